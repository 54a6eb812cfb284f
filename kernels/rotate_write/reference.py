"""Rotary encoding and the KV write in plain PyTorch. Knows pairs of a head and how slots number the pages."""

import torch
from torch import Tensor

from ..kv_format import LayerPages, Pages
from ..kv_format import reference as kv_format
from ..kv_format.reference import encode


def rotate_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: LayerPages
) -> Tensor:
    """Query [T, Q, D] turned; key and value [T, K, D] go to the pages, the keys turned; see the contract."""
    write_kv(turn(key, cos, sin), value, slots, pages)
    return turn(query, cos, sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, heads, D] turned by the angles of their tokens."""
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def write_kv(key: Tensor, value: Tensor, slots: Tensor, pages: LayerPages) -> None:
    """Stores key and value [T, K, D] as they are in their slots of the pages."""
    spread = kv_format.turn(key.float()) if pages.keys.format.turned else key
    _write(spread, slots, pages.keys)
    _write(value, slots, pages.values)


def _write(vectors: Tensor, slots: Tensor, pages: Pages) -> None:
    codes, scales = encode(pages.format, vectors.transpose(0, 1))
    for rows, stored in ((codes, pages.codes), (scales, pages.scales)):
        if rows.shape[-1]:
            blocks, offsets = slots // pages.codes.shape[2], slots % pages.codes.shape[2]
            _as_bytes(stored)[:, blocks, offsets] = _as_bytes(rows)


def _as_bytes(codes: Tensor) -> Tensor:
    """Codes of one byte as int8, which every torch can move about."""
    return codes.view(torch.int8) if codes.dtype.itemsize == 1 else codes
