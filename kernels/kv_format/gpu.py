"""Codes of cached vectors as operands of matrix products, in Triton: what kernels read of the pages, format by format.

Knows tiles of one head, not pages or slots. A scale that a whole vector, or half of an int4 vector, has in common is
left to the caller, who applies it to scores and probabilities instead of to every number.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import GROUP, KVFormat, Pages, turn_width
from .gpu_assembly import (
    FIRST_FP8_TO_BFLOAT16,
    FIRST_FP8_TO_FLOAT16,
    FIRST_INT8_TO_BFLOAT16,
    FIRST_INT8_TO_FLOAT16,
    FP8_TO_BFLOAT16,
    FP8_TO_FLOAT16,
    HIGH_TO_BFLOAT16,
    HIGH_TO_FLOAT16,
    INT8_TO_BFLOAT16,
    INT8_TO_FLOAT16,
    LOW_TO_BFLOAT16,
    LOW_TO_FLOAT16,
    SECOND_FP8_TO_BFLOAT16,
    SECOND_FP8_TO_FLOAT16,
    SECOND_INT8_TO_BFLOAT16,
    SECOND_INT8_TO_FLOAT16,
)

FP8, INT8, INT4 = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
GROUP_SIZE = tl.constexpr(GROUP)
NARROWEST = 16  # of a matrix product's operand


@dataclass(frozen=True, slots=True)
class Stored:
    """How a kernel reads the vectors of one side: constants of its compilation."""

    format: int
    width: int  # D
    part_width: int  # elements of a part: of the whole vector, or of one of its two parts
    padded: int  # the same as a power of two
    scaled: bool
    folds: bool  # every part has one scale alone
    num_scales: int
    turn: int  # p where vectors are turned, else 0
    turn_stages: int  # log2 of it
    turn_factor: float  # what makes a turn orthonormal, as float32
    assembly: bool  # compiled for a device, not interpreted
    moved: bool  # numbers are made where codes are loaded, and moved to where products want them
    pairs: bool  # codes of a byte are read by two, the first ones as one part and the second ones as another

    @property
    def halves(self) -> bool:
        """A byte holds two numbers half a vector apart, which are read as two parts."""
        return self.format == 4

    @property
    def parts(self) -> int:
        """How many products a vector is read in."""
        return 2 if self.halves or self.pairs else 1

    @property
    def spread(self) -> int:
        """From an element of a part to its next, in elements of the vector."""
        return 2 if self.pairs else 1

    @property
    def begin(self) -> int:
        """The first element of the second part."""
        return 1 if self.pairs else self.part_width


def stored(
    format: KVFormat, head_dim: int, *, keys: bool, assembly: bool, moved: bool = False, pairs: bool = False
) -> Stored:
    """The constants for vectors of a format, which are keys or values."""
    width = format.width(head_dim) // (2 if pairs else 1)
    turns = turn_width(head_dim) if keys and format.turned else 0
    folds = format.scaled and (not format.packed or head_dim <= GROUP or head_dim == 2 * GROUP)
    return Stored(
        format=format.number,
        width=head_dim,
        part_width=width,
        padded=max(NARROWEST, triton.next_power_of_2(width)),
        scaled=format.scaled,
        folds=folds,
        num_scales=format.num_scales(head_dim),
        turn=turns,
        turn_stages=max(turns.bit_length() - 1, 0),
        turn_factor=float(np.float32(1) / np.sqrt(np.float32(max(turns, 1)))),
        assembly=assembly,
        moved=moved,
        pairs=pairs,
    )


def addresses(pages: Pages, *, pairs: bool = False) -> tuple[Tensor, Tensor]:
    """Codes, those of fp8 as bytes, or by two, and scales; a format without scales has codes in their place."""
    codes = pages.codes.view(torch.uint8) if pages.codes.dtype == torch.float8_e4m3fn else pages.codes
    codes = codes.view(torch.int16) if pairs else codes
    return codes, pages.scales if pages.format.scaled else codes


@triton.jit
def load_codes(codes, slot, inside, S: tl.constexpr, MASKED: tl.constexpr):
    """Codes [keys, padded] of the vectors in slots [keys] of pages seen as [slots, W]."""
    column = tl.arange(0, S.padded)
    place = codes + slot[:, None] * S.part_width + column[None, :]
    if MASKED:
        read = tl.load(place, mask=inside[:, None] & (column < S.part_width)[None, :], other=0)
    elif S.padded == S.part_width:
        read = tl.load(place)
    else:
        read = tl.load(place, mask=(column < S.part_width)[None, :], other=0)
    return read


@triton.jit
def load_scale(scales, slot, inside, place: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr):
    """One float32 number [keys] beside each vector."""
    source = scales + slot * S.num_scales + place
    return tl.load(source, mask=inside, other=0.0) if MASKED else tl.load(source)


@triton.jit
def part_numbers(codes, scales, slot, inside, PART: tl.constexpr, dtype: tl.constexpr, S: tl.constexpr):
    """A part of the vectors as numbers of dtype: the codes alone where scales fold, else the numbers they stand for."""
    ASSEMBLY: tl.constexpr = S.assembly and dtype.primitive_bitwidth == 16
    if S.pairs:
        numbers = numbers_of_pairs(codes, PART, dtype, ASSEMBLY, S)
    elif S.format == FP8:
        if ASSEMBLY:
            numbers = four_at_once(codes, FP8_TO_BFLOAT16, FP8_TO_FLOAT16, dtype, S)
        else:
            numbers = fp8_numbers(codes, dtype)
    elif S.format == INT8 and ASSEMBLY:
        numbers = four_at_once(codes, INT8_TO_BFLOAT16, INT8_TO_FLOAT16, dtype, S)
    elif S.format == INT4 and S.folds and ASSEMBLY:
        if PART:
            numbers = four_at_once(codes, HIGH_TO_BFLOAT16, HIGH_TO_FLOAT16, dtype, S)
        else:
            numbers = four_at_once(codes, LOW_TO_BFLOAT16, LOW_TO_FLOAT16, dtype, S)
    elif S.format == INT4:
        steps = (codes >> 4) if PART else (codes & 15)
        if S.folds:
            numbers = steps.to(tl.int8).to(dtype)
        else:
            scale, least = group_scales(scales, slot, inside, PART, S)
            numbers = (steps.to(tl.float32) * scale + least).to(dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def numbers_of_pairs(words, PART: tl.constexpr, dtype: tl.constexpr, ASSEMBLY: tl.constexpr, S: tl.constexpr):
    """The first or the second numbers of pairs of codes.

    Products take values key by key, while codes lie element by element. Pairs are transposed on their way from shared
    memory, as 16-bit numbers are; bytes would cost a load each.
    """
    if ASSEMBLY and S.format == FP8:
        if PART:
            numbers = two_at_once(words, SECOND_FP8_TO_BFLOAT16, SECOND_FP8_TO_FLOAT16, dtype)
        else:
            numbers = two_at_once(words, FIRST_FP8_TO_BFLOAT16, FIRST_FP8_TO_FLOAT16, dtype)
    elif ASSEMBLY:
        if PART:
            numbers = two_at_once(words, SECOND_INT8_TO_BFLOAT16, SECOND_INT8_TO_FLOAT16, dtype)
        else:
            numbers = two_at_once(words, FIRST_INT8_TO_BFLOAT16, FIRST_INT8_TO_FLOAT16, dtype)
    else:
        codes = (words >> (8 * PART)).to(tl.int8)
        numbers = fp8_numbers(codes, dtype) if S.format == FP8 else codes.to(dtype)
    return numbers


@triton.jit
def two_at_once(words, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, dtype: tl.constexpr):
    """One number of every word, by the instructions for either type."""
    if dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(BFLOAT16, "=r,r", [words], tl.bfloat16, True, 2)
    else:
        numbers = tl.inline_asm_elementwise(FLOAT16, "=r,r", [words], tl.float16, True, 2)
    return numbers


@triton.jit
def four_at_once(codes, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, dtype: tl.constexpr, S: tl.constexpr):
    """Numbers of bytes by the instructions for either type.

    Products take values key by key, while codes lie element by element, and bytes cannot be transposed on their way as
    16-bit numbers can: made of codes already in the product's order, numbers cost a load for every byte. Assembly that
    is said to have effects stays where the codes were loaded, in long runs.
    """
    STAYS: tl.constexpr = S.moved
    if dtype == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(BFLOAT16, "=r,=r,r", [codes], tl.bfloat16, not STAYS, 4)
    else:
        numbers = tl.inline_asm_elementwise(FLOAT16, "=r,=r,r", [codes], tl.float16, not STAYS, 4)
    return numbers


@triton.jit
def fp8_numbers(codes, dtype: tl.constexpr):
    """Numbers of e4m3 codes in bytes, exact in every dtype: bits put in place, then the exponent moved to its bias.

    Codes that stand for NaN are not written (see the contract), and are not told from others.
    """
    wide = codes.to(tl.int32)
    bits = ((wide & 127) << 20) | ((wide & 128) << 24)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120


@triton.jit
def group_scales(scales, slot, inside, PART: tl.constexpr, S: tl.constexpr):
    """Scale and least number of every element of half an int4 vector, [keys, padded] or [keys, 1]."""
    groups: tl.constexpr = S.num_scales // 2
    first: tl.constexpr = PART * S.part_width // GROUP_SIZE
    reach: tl.constexpr = ((PART + 1) * S.part_width - 1) // GROUP_SIZE + 1
    end: tl.constexpr = reach if reach < groups else groups
    group = (PART * S.part_width + tl.arange(0, S.padded)[None, :]) // GROUP_SIZE
    scale = load_scale(scales, slot, inside, first, S, True)[:, None]
    least = load_scale(scales, slot, inside, groups + first, S, True)[:, None]
    for other in tl.static_range(first + 1, end):
        scale = tl.where(group == other, load_scale(scales, slot, inside, other, S, True)[:, None], scale)
        least = tl.where(group == other, load_scale(scales, slot, inside, groups + other, S, True)[:, None], least)
    return scale, least


@triton.jit
def hadamard(ROWS: tl.constexpr, PART: tl.constexpr, S: tl.constexpr):
    """[ROWS, padded]: the columns that give a part of the turned vector, in units of their common factor."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, S.padded)[None, :]
    element = PART * S.part_width + column
    odd = (row % S.turn) & (element % S.turn)
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    inside = (row // S.turn == element // S.turn) & (row < S.width) & (element < S.width) & (column < S.part_width)
    return tl.where(inside, 1.0 - 2.0 * (odd & 1).to(tl.float32), 0.0)
