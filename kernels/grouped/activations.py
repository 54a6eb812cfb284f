"""Activations for the quantised products of a GPU, by Triton: codes with scales, and sums of chains.

Knows rows of numbers; which product they are for is the caller's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, power_of_two
from ..rounding import E4M3, INT8, LARGEST

SMALLEST = 2.0**-100  # the largest number of a segment that counts as zero lies below
NEAREST = 12582912.0  # 1.5 * 2^23: adding it rounds what is below 2^22 to a whole number, ties to even
NUMBERS_PER_PROGRAM = 1024
_DTYPES = {INT8: torch.int8, E4M3: torch.float8_e4m3fn}


@triton.jit
def round_to_codes(
    x, x_stride, codes, codes_stride, scale, inputs, segment, segments, MOST: tl.constexpr, WHOLE: tl.constexpr,
    SMALLEST: tl.constexpr, NEAREST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS segments of one token; what lies behind the inputs becomes codes of 0."""
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
    scaled = tl.where(usable[:, None], numbers * factor[:, None], 0.0)
    target = codes + token * codes_stride + place
    stored = (place < codes_stride) & (within < segment) & (part < segments)
    if WHOLE:
        tl.store(target, ((scaled + NEAREST) - NEAREST).to(tl.int8), mask=stored)
    else:
        # Rounded before the cast, which is exact then: the interpreter's does not carry into the exponent.
        power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        above = tl.maximum(power, 2.0**-6) * (NEAREST / 8)
        tl.store(target, ((scaled + above) - above).to(tl.float8e4nv), mask=stored)
    unit = tl.where(usable, tl.div_rn(largest, tl.full([ROWS], MOST, tl.float32)), 0.0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tl.store(scale + token * segments + row, tl.where(finite, unit, float("nan")), mask=row < segments)


@triton.jit
def add_chains(x, x_stride, sums, inputs, chain, chains, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """sums [tokens, chains] of x [tokens, inputs]."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, WIDTH)[None, :]
    place = part[:, None] * chain + within
    numbers = tl.load(x + token * x_stride + place, mask=(place < inputs) & (within < chain), other=0.0)
    tl.store(sums + token * chains + part, tl.sum(numbers.to(tl.float32), 1), mask=part < chains)


def rounded(x: Tensor, numbers: str, segment: int, width: int) -> tuple[Tensor, Tensor]:
    """x [T, H] as codes [T, width] and scales [T, segments] float32; `width` is at least H."""
    segments = -(-width // segment)
    codes = torch.empty((len(x), width), dtype=_DTYPES[numbers], device=x.device)
    scale = torch.empty((len(x), segments), dtype=torch.float32, device=x.device)
    plan_codes(x, codes, scale, numbers, segment).run()
    return codes, scale


def plan_codes(x: Tensor, codes: Tensor, scale: Tensor, numbers: str, segment: int) -> Launch:
    """The launch of `round_to_codes` for x [T, H], codes [T, width] and scale [T, segments]."""
    rows = x if x.stride(1) == 1 else x.contiguous()
    segments, block = scale.shape[1], power_of_two(segment)
    parts = min(power_of_two(segments), max(1, NUMBERS_PER_PROGRAM // block))
    constants = {
        "MOST": LARGEST[numbers],
        "WHOLE": numbers == INT8,
        "SMALLEST": SMALLEST,
        "NEAREST": NEAREST,
        "ROWS": parts,
        "WIDTH": block,
    }
    arguments = (rows, rows.stride(0), codes, codes.shape[1], scale, x.shape[1], segment, segments)
    warps = min(16, max(4, parts * block // 512))
    return Launch(round_to_codes, (len(x), -(-segments // parts)), arguments, constants, warps)


def chain_sums(x: Tensor, chain: int, chains: int) -> Tensor:
    """[T, chains] float32: the sums of x [T, H] over `chain` inputs each."""
    sums = torch.empty((len(x), chains), dtype=torch.float32, device=x.device)
    plan_sums(x, sums, chain).run()
    return sums


def plan_sums(x: Tensor, sums: Tensor, chain: int) -> Launch:
    """The launch of `add_chains` for x [T, H] and sums [T, chains]."""
    chains, block = sums.shape[1], power_of_two(chain)
    parts = min(power_of_two(chains), max(1, NUMBERS_PER_PROGRAM // block))
    return Launch(
        add_chains,
        (len(x), -(-chains // parts)),
        (x, x.stride(0), sums, x.shape[1], chain, chains),
        {"ROWS": parts, "WIDTH": block},
        min(16, max(4, parts * block // 512)),
    )
