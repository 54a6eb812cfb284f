"""Packed blocks to whole numbers with scales, exactly: 4-bit whole numbers as `Int4Weight`, others as `Int8Weight`.

Knows the byte layout of each block type (models.md §7) and nothing of rounding: the values equal those of `expand.py`
bit for bit. Scale and minimum stay float16 where both are exact in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight, packed
from batchgen.kernels.linear_int8 import Int8Weight

from .blocks import BlockType
from .expand import (
    FP4_DOUBLED,
    blocks_of,
    half,
    mxfp4_half_scale,
    nibbles,
    q4_k_scales,
    q6_k_codes,
    q6_k_scales,
    slices,
)

QuantisedWeight = Int4Weight | Int8Weight | Fp8Weight


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight in whole numbers. `order` [H]: its column i belongs to input order[i]; None: to input i."""

    weight: QuantisedWeight
    order: Tensor | None = None


def repack(kind: BlockType, raw: NDArray[np.uint8], *kinds: type[QuantisedWeight]) -> Stored | None:
    """raw [rows, bytes per row] of a matrix; None for plain numbers, and for a weight that is of none of the kinds."""
    if kind.name not in _REPACK:
        return None
    made, one = _REPACK[kind.name]
    if kinds and made not in kinds:
        return None
    parts = slices(len(raw), raw.shape[1] // kind.bytes * kind.size)
    weights = [one(blocks_of(kind, raw[part]), part.stop - part.start) for part in parts]
    return Stored(stacked(weights))


def stacked(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """Weights of one kind and group size as one, outputs one behind the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    q = torch.cat([weight.q for weight in weights])
    scale = _joined([weight.scale for weight in weights])
    if isinstance(first, Fp8Weight):
        return Fp8Weight(q, scale, first.group)
    minima = [weight.minimum for weight in weights if weight.minimum is not None]
    if isinstance(first, Int4Weight):
        return Int4Weight(q, scale, _joined(minima, scale.dtype), first.group)
    return Int8Weight(
        q, scale, _joined(minima, scale.dtype) if minima else None, first.group, first.turned, first.balance
    )


def _joined(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """In the widest of their dtypes, or the given one."""
    wide = dtype or (torch.float32 if any(part.dtype == torch.float32 for part in parts) else torch.float16)
    return torch.cat([part.to(wide) for part in parts])


def in_half(scale: Tensor, minimum: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as float16 where that changes no value, else both as float32."""
    given = [part for part in (scale, minimum) if part is not None]
    if all(torch.equal(part.half().float(), part) for part in given):
        return scale.half(), None if minimum is None else minimum.half()
    return scale.float(), None if minimum is None else minimum.float()


def _int4(codes: Tensor, scale: Tensor, minimum: Tensor, rows: int) -> Int4Weight:
    """codes [blocks, 32 or parts of 32], scale and minimum float32 one for each 32."""
    short, low = in_half(scale.reshape(rows, -1), minimum.reshape(rows, -1))
    assert low is not None
    return Int4Weight(packed(codes.reshape(rows, -1)), short, low, 32)


def _q4_0(blocks: Tensor, rows: int) -> Int4Weight:
    scale = half(blocks, 0)
    return _int4(nibbles(blocks[:, 2:]), scale, -8 * scale, rows)


def _q4_1(blocks: Tensor, rows: int) -> Int4Weight:
    return _int4(nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2), rows)


def _q4_k(blocks: Tensor, rows: int) -> Int4Weight:
    scales, minima = q4_k_scales(blocks[:, 4:16])
    codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _int4(codes, half(blocks, 0) * scales, -(half(blocks, 2) * minima), rows)


def _q8_0(blocks: Tensor, rows: int) -> Int8Weight:
    codes = blocks[:, 2:].contiguous().view(torch.int8).view(rows, -1)
    return Int8Weight(codes, half(blocks, 0).half().view(rows, -1), None, 32)


def _q6_k(blocks: Tensor, rows: int) -> Int8Weight:
    codes = (q6_k_codes(blocks).to(torch.int8) - 32).reshape(rows, -1)
    scale, _ = in_half(q6_k_scales(blocks).reshape(rows, -1), None)
    return Int8Weight(codes, scale, None, 16)


def _mxfp4(blocks: Tensor, rows: int) -> Int8Weight:
    """Twice the value of every code is whole."""
    codes = FP4_DOUBLED[nibbles(blocks[:, 1:]).long()].view(rows, -1)
    scale, _ = in_half(mxfp4_half_scale(blocks).view(rows, -1), None)
    return Int8Weight(codes, scale, None, 32)


_REPACK: dict[str, tuple[type[QuantisedWeight], Callable[[Tensor, int], QuantisedWeight]]] = {
    "Q4_0": (Int4Weight, _q4_0),
    "Q4_1": (Int4Weight, _q4_1),
    "Q4_K": (Int4Weight, _q4_k),
    "Q8_0": (Int8Weight, _q8_0),
    "Q6_K": (Int8Weight, _q6_k),
    "MXFP4": (Int8Weight, _mxfp4),
}
