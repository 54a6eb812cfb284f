"""Activations for the quantised products of a GPU, by Triton: codes with scales, what codes stand for, sums of chains.

Knows rows of numbers; which product they are for is the caller's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, power_of_two
from ..rounding import E4M3, INT8, LARGEST
from .choice import TILE_TOKENS

SMALLEST = 2.0**-100  # the largest number of a segment that counts as zero lies below
NEAREST = 12582912.0  # 1.5 * 2^23: adding it rounds what is below 2^22 to a whole number, ties to even
NUMBERS_PER_PROGRAM = 1024
NIBBLE_UNIT = 512.0  # how many times a 4-bit code is what its bits say as an 8-bit float
_DTYPES = {INT8: torch.int8, E4M3: torch.float8_e4m3fn}


@triton.jit
def round_to_codes(
    x, x_stride, out, out_stride, scale, scale_stride, sums, sums_stride, inputs, segment, segments, chains,
    MOST: tl.constexpr, WHOLE: tl.constexpr, CODES: tl.constexpr, CHAIN: tl.constexpr, UNIT: tl.constexpr,
    SMALLEST: tl.constexpr, NEAREST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS segments of one token; what lies behind the inputs becomes codes of 0.

    `out` gets the codes, and scale [segments, tokens] what they are times, in units of 1 / UNIT; without CODES `out`
    gets the numbers they stand for. With CHAIN, and one segment: sums [chains, tokens] gets the sums of the codes of
    every CHAIN inputs, in units of UNIT.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    within = tl.arange(0, WIDTH)[None, :]
    place = part * segment + within
    numbers = tl.load(x + token * x_stride + place, mask=(place < inputs) & (within < segment), other=0.0)
    numbers = numbers.to(tl.float32)
    size = tl.abs(numbers)
    finite = tl.min((size < float("inf")).to(tl.int32), 1) == 1
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    usable = finite & (largest >= SMALLEST)
    factor = tl.where(usable, tl.div_rn(tl.full([ROWS], MOST, tl.float32), tl.where(usable, largest, 1.0)), 0.0)
    unit = tl.where(usable, tl.div_rn(largest, tl.full([ROWS], MOST, tl.float32)), 0.0)
    unit = tl.where(finite, unit, float("nan"))
    scaled = tl.where(usable[:, None], numbers * factor[:, None], 0.0)
    if WHOLE:
        above = tl.full([], NEAREST, tl.float32)
    else:
        # Rounded before the cast, which is exact then: the interpreter's does not carry into the exponent.
        power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        above = tl.maximum(power, 2.0**-6) * (NEAREST / 8)
    made = (scaled + above) - above
    target = out + token * out_stride + place
    stored = (place < out_stride) & (within < segment) & (part < segments)
    if CODES:
        tl.store(target, made.to(out.dtype.element_ty), mask=stored)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        tl.store(scale + row * scale_stride + token, unit * UNIT, mask=row < segments)
    else:
        tl.store(target, (made * unit[:, None]).to(out.dtype.element_ty), mask=stored)
    if CHAIN:
        chain = tl.arange(0, WIDTH // CHAIN)
        total = tl.sum(tl.reshape(made, [WIDTH // CHAIN, CHAIN]), 1) * (1.0 / UNIT)
        tl.store(sums + chain * sums_stride + token, total, mask=chain < chains)


@triton.jit
def add_chains(x, x_stride, sums, sums_stride, inputs, chain, chains, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """sums [chains, tokens] of x [tokens, inputs]."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, WIDTH)[None, :]
    place = part[:, None] * chain + within
    numbers = tl.load(x + token * x_stride + place, mask=(place < inputs) & (within < chain), other=0.0)
    tl.store(sums + part * sums_stride + token, tl.sum(numbers.to(tl.float32), 1), mask=part < chains)


def rounded(x: Tensor, numbers: str, segment: int, width: int) -> tuple[Tensor, Tensor]:
    """x [T, H] as codes [T, width] and scales, a row for each segment; `width` is at least H."""
    codes, scale = _codes(x, numbers, width), by_token(x, -(-width // segment))
    plan_codes(x, codes, scale, numbers, segment).run()
    return codes, scale


def rounded_with_sums(x: Tensor, chain: int, chains: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """For products with 4-bit codes that are read as 8-bit floats: codes [T, width], one row of scales, and sums.

    Sums are those of the codes over `chain` inputs each, a power of two, or of all where there is one chain.
    """
    codes, scale, sums = _codes(x, E4M3, width), by_token(x, 1), by_token(x, chains)
    plan_codes(x, codes, scale, E4M3, width, sums, chain).run()
    return codes, scale, sums


def restored(x: Tensor, numbers: str, segment: int) -> Tensor:
    """What the codes of x [T, H] stand for, rounded to its dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan_codes(x, out, by_token(x, -(-x.shape[1] // segment)), numbers, segment).run()
    return out


def chain_sums(x: Tensor, chain: int, chains: int) -> Tensor:
    """The sums of x [T, H] over `chain` inputs each, a row for each chain."""
    sums = by_token(x, chains)
    plan_sums(x, sums, chain).run()
    return sums


def by_token(x: Tensor, rows: int) -> Tensor:
    """[rows, T filled up] float32, not set: a program reads whole tiles of tokens, each thread neighbours."""
    padded = -(-len(x) // TILE_TOKENS[-1]) * TILE_TOKENS[-1]
    return torch.empty((rows, padded), dtype=torch.float32, device=x.device)


def _codes(x: Tensor, numbers: str, width: int) -> Tensor:
    return torch.empty((len(x), width), dtype=_DTYPES[numbers], device=x.device)


def plan_codes(
    x: Tensor, out: Tensor, scale: Tensor, numbers: str, segment: int, sums: Tensor | None = None, chain: int = 0
) -> Launch:
    """The launch of `round_to_codes` for x [T, H], scale and sums as `by_token` makes them; sums need one segment.

    out [T, width] takes the codes, or where it has another dtype than these, what they stand for.
    """
    rows = x if x.stride(1) == 1 else x.contiguous()
    segments, block = len(scale), power_of_two(segment)
    parts = min(power_of_two(segments), max(1, NUMBERS_PER_PROGRAM // block))
    chains, summed = (0, scale) if sums is None else (len(sums), sums)
    constants = {
        "MOST": LARGEST[numbers],
        "WHOLE": numbers == INT8,
        "CODES": out.dtype == _DTYPES[numbers],
        "CHAIN": block if chains == 1 else chain,
        "UNIT": NIBBLE_UNIT if chains else 1.0,
        "SMALLEST": SMALLEST,
        "NEAREST": NEAREST,
        "ROWS": parts,
        "WIDTH": block,
    }
    addresses = (rows, rows.stride(0), out, out.shape[1], scale, scale.stride(0), summed, summed.stride(0))
    warps = min(16, max(4, parts * block // 512))
    grid = (len(x), -(-segments // parts))
    sizes = (x.shape[1], segment, segments, chains)
    return Launch(round_to_codes, grid, (*addresses, *sizes), constants, warps, fused=False)


def plan_sums(x: Tensor, sums: Tensor, chain: int) -> Launch:
    """The launch of `add_chains` for x [T, H] and sums as `by_token` makes them."""
    chains, block = len(sums), power_of_two(chain)
    parts = min(power_of_two(chains), max(1, NUMBERS_PER_PROGRAM // block))
    arguments = (x, x.stride(0), sums, sums.stride(0), x.shape[1], chain, chains)
    warps = min(16, max(4, parts * block // 512))
    return Launch(add_chains, (len(x), -(-chains // parts)), arguments, {"ROWS": parts, "WIDTH": block}, warps)
