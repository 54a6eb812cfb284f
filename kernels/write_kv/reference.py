"""The KV write in plain PyTorch. Knows how slots number the pages, not whose they are."""

import torch
from torch import Tensor

from ..kv_format import LayerPages, Pages
from ..kv_format.reference import encode, turn


def write_kv(key: Tensor, value: Tensor, slots: Tensor, pages: LayerPages) -> None:
    """Stores key and value [T, K, D] in their slots of the pages; see the contract."""
    turned = turn(key.float()) if pages.keys.format.turned else key
    _write(turned, slots, pages.keys)
    _write(value, slots, pages.values)


def _write(vectors: Tensor, slots: Tensor, pages: Pages) -> None:
    codes, scales = encode(pages.format, vectors.transpose(0, 1))
    for rows, stored in ((codes, pages.codes), (scales, pages.scales)):
        if rows.shape[-1]:
            _as_bytes(stored).flatten(1, 2).index_copy_(1, slots, _as_bytes(rows))


def _as_bytes(codes: Tensor) -> Tensor:
    """Codes of one byte as int8, which every torch can move about."""
    return codes.view(torch.int8) if codes.dtype.itemsize == 1 else codes
