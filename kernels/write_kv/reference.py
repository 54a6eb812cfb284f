"""The KV write in plain PyTorch. Knows how slots number the pages, not whose they are."""

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, slots: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """Copies key and value [T, K, D] to their slots of the pages [K, N, B, D]; see the contract."""
    for source, pages in ((key, key_pages), (value, value_pages)):
        num_heads, num_blocks, block_size, head_dim = pages.shape
        rows = pages.view(num_heads, num_blocks * block_size, head_dim)
        rows.index_copy_(1, slots, source.transpose(0, 1).to(pages.dtype))
