"""Making codes of vectors in Triton, bit for bit as reference.py does: what the KV write stores.

Knows tiles [heads, padded] of float32 numbers in element order, and where they go. Every step is rounded as the
reference rounds it, so launches do not let products and sums be fused.
"""

import triton
import triton.language as tl

from .gpu import FP8, GROUP_SIZE, INT4, INT8

LARGEST = tl.constexpr(2.0**126)
SMALLEST = tl.constexpr(2.0**-100)
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added and taken away, it rounds to whole numbers, ties to even
FP8_BIAS = tl.constexpr(120 << 3)  # between the exponents of float32 and e4m3, in units of the last kept bit


@triton.jit
def store_vectors(x, present, slot, codes, scales, PADDED: tl.constexpr, S: tl.constexpr):
    """Puts vectors x into slots [heads] of pages seen as [slots, W], as the format has it; absent ones go nowhere."""
    column = tl.arange(0, PADDED)[None, :]
    kept = present[:, None] & (column < S.part_width)
    place = codes + slot[:, None] * S.part_width + column
    if S.format == INT4:
        made = int4_codes(x, present, slot, scales, PADDED, S)
    elif S.scaled:
        made = symmetric_codes(x, present, slot, scales, S)
    else:
        made = x
    tl.store(place, made.to(codes.dtype.element_ty), mask=kept)


@triton.jit
def scale_of(extent, highest):
    """The scale that spreads codes over the extent, and the factor that makes codes. NaN stays NaN."""
    scale = tl.where(extent < SMALLEST, 0.0, tl.div_rn(extent, highest))
    return scale, tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, scale))


@triton.jit
def is_broken(x):
    """1 where a number is NaN or infinite."""
    return tl.where(tl.abs(x) < float("inf"), 0, 1)


@triton.jit
def symmetric_codes(x, present, slot, scales, S: tl.constexpr):
    """Codes of int8 or fp8; the scales are stored."""
    highest: tl.constexpr = 448.0 if S.format == FP8 else 127.0
    largest = tl.minimum(tl.max(tl.abs(x), 1), LARGEST)
    largest = tl.where(tl.max(is_broken(x), 1) == 1, float("nan"), largest)
    scale, factor = scale_of(largest, tl.full(largest.shape, highest, tl.float32))
    tl.store(scales + slot, scale, mask=present)
    steps = tl.minimum(tl.maximum(x * factor[:, None], -highest), highest)
    steps = tl.where(factor[:, None] > 0.0, steps, 0.0)
    return (steps + ROUNDER) - ROUNDER if S.format == INT8 else fp8_codes(steps)


@triton.jit
def fp8_codes(x):
    """e4m3 bits of numbers of at most 448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - FP8_BIAS
    below = ((tl.abs(x) * 512.0 + ROUNDER) - ROUNDER).to(tl.int32)
    return tl.where(tl.abs(x) < 0.015625, below, normal) | ((bits >> 24) & 0x80)


@triton.jit
def int4_codes(x, present, slot, scales, PADDED: tl.constexpr, S: tl.constexpr):
    """Bytes of two codes, the second half of a vector above the first; steps and least numbers are stored."""
    column = tl.arange(0, PADDED)[None, :]
    groups: tl.constexpr = S.num_scales // 2
    steps = tl.zeros_like(x)
    inner = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    for group in tl.static_range(groups):
        mine = (column // GROUP_SIZE == group) & (column < S.width)
        least = tl.min(tl.where(mine, inner, float("inf")), 1)
        most = tl.max(tl.where(mine, inner, float("-inf")), 1)
        least = tl.where(tl.max(tl.where(mine, is_broken(x), 0), 1) == 1, float("nan"), least)
        scale, factor = scale_of(most - least, tl.full(least.shape, 15.0, tl.float32))
        tl.store(scales + slot * S.num_scales + group, scale, mask=present)
        tl.store(scales + slot * S.num_scales + groups + group, least, mask=present)
        made = tl.minimum(tl.maximum((inner - least[:, None]) * factor[:, None], 0.0), 15.0)
        steps = tl.where(mine & (factor[:, None] > 0.0), (made + ROUNDER) - ROUNDER, steps)
    codes = steps.to(tl.int32)
    above = tl.minimum(column + S.part_width, PADDED - 1) + tl.zeros_like(codes)
    high = tl.where(column + S.part_width < S.width, tl.gather(codes, above, 1), 0)
    return codes | (high << 4)


@triton.jit
def turn(x, PADDED: tl.constexpr, S: tl.constexpr):
    """Vectors times the Hadamard matrix of each block of `S.turn` elements, in the order of the reference."""
    column = tl.arange(0, PADDED)[None, :] + tl.zeros_like(x).to(tl.int32)
    stages: tl.constexpr = S.turn_stages
    for stage in tl.static_range(stages):
        partner = tl.gather(x, column ^ (1 << stage), 1)
        x = tl.where((column >> stage) & 1 == 1, partner - x, x + partner)
    return x * S.turn_factor
