"""Packed blocks to numbers, in float32 with one rounding per product and sum, then to the wanted dtype.

Knows the byte layout of each block type (models.md §7); works on a slice of rows at a time so that its scratch stays
in the cache.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .blocks import BlockType

# Fewer values than torch would spread over its threads: a slice stays in the cache and takes no barrier, which on a
# busy machine costs far more than the work (seconds instead of tenths for the demo model).
_VALUES_PER_SLICE = (1 << 15) - 1


def expand_into(kind: BlockType, raw: NDArray[np.uint8], out: Tensor) -> None:
    """raw [rows, bytes per row] -> out, [rows, values per row] or one row as a vector, in the dtype of `out`."""
    expand = _EXPAND[kind.name]
    rows = out.reshape(raw.shape[0], -1) if out.dim() == 1 else out
    for part in slices(*rows.shape):
        rows[part] = expand(blocks_of(kind, raw[part])).view(-1, rows.shape[1])


def slices(rows: int, columns: int) -> Iterator[slice]:
    """The rows of a matrix in parts of few values."""
    step = max(1, _VALUES_PER_SLICE // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def blocks_of(kind: BlockType, raw: NDArray[np.uint8]) -> Tensor:
    """raw [rows, bytes per row] as [blocks, bytes]."""
    return torch.from_numpy(np.ascontiguousarray(raw)).view(-1, kind.bytes)


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, [blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """Bytes [..., n] -> [..., 2n]: all the low nibbles, then all the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks, 0))


def _q6_k(blocks: Tensor) -> Tensor:
    codes = q6_k_codes(blocks).float() - 32
    return q6_k_scales(blocks).unsqueeze(-1) * codes


def q6_k_codes(blocks: Tensor) -> Tensor:
    """[blocks, 16 groups, 16] uint8, 0 .. 63 each."""
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # half, byte group, byte
    low = torch.cat([low & 15, low >> 4], dim=2)  # half, quarter j, l
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return (low | (((high >> shifts) & 3) << 4)).view(-1, 16, 16)


def q6_k_scales(blocks: Tensor) -> Tensor:
    """[blocks, 16 groups] float32."""
    return half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = q4_k_scales(blocks[:, 4:16])
    packed = blocks[:, 16:].view(-1, 4, 1, 32)
    codes = torch.cat([packed & 15, packed >> 4], dim=2).view(-1, 8, 32).float()
    scale = (half(blocks, 0) * scales).unsqueeze(-1)
    minimum = (half(blocks, 2) * minima).unsqueeze(-1)
    return scale * codes - minimum


def q4_k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima of 8 sub-blocks, [blocks, 8] float32 each, from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float(), minima.float()


# Twice what the 16 codes of a 4-bit float (e2m1) stand for.
FP4_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def _mxfp4(blocks: Tensor) -> Tensor:
    codes = torch.cat([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], dim=-1)
    return FP4_DOUBLED[codes.long()].float().mul_(mxfp4_half_scale(blocks))


def mxfp4_half_scale(blocks: Tensor) -> Tensor:
    """Half of 2^(s-127) for the byte s of every block, [blocks, 1] float32."""
    return powers_of_two(blocks[:, :1]) * 0.5


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(s-127) for bytes s, float32; NaN for 255."""
    bits = exponents.int() << 23
    bits = bits.where(exponents != 0, torch.tensor(0x00400000, dtype=torch.int32))
    return bits.where(exponents != 255, torch.tensor(0x7FC00000, dtype=torch.int32)).view(torch.float32)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.view(dtype).float()


_EXPAND: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
