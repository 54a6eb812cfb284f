"""KV pages: the storage behind block ids. Which block belongs to whom is decided in blocks.py."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one cached token takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPages:
    """keys[layer] and values[layer]: [num_kv_heads, num_blocks, block_size, head_dim]."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        pages = (shape.num_kv_heads, num_blocks, block_size, shape.head_dim)
        self.keys = [torch.zeros(pages, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(pages, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination) each, in every layer."""
        if not pairs:
            return
        source = torch.tensor([pair[0] for pair in pairs], device=self.keys[0].device)
        destination = torch.tensor([pair[1] for pair in pairs], device=self.keys[0].device)
        for pages in (*self.keys, *self.values):
            pages[:, destination] = pages[:, source]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index], self.values[index]
