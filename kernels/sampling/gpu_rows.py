"""Rows of logits by Triton: the pieces that the sampling kernels are made of. Knows one row, nothing of filters.

A program holds one row and goes over it in blocks, so sums have one order whatever the batch. Floats are compared and
searched as whole numbers of the same order (`ordered`), between which half-way is exact.
"""

import triton
import triton.language as tl

BLOCK = 4096  # numbers of a row that are looked at together, by WARPS warps
WARPS = 16
SEARCHED = 2048  # numbers that are compared with WAYS thresholds together
WAYS = 8
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def ordered(values):
    """int32 that compare as the floats do; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def mixed(bits):
    """lowbias32 of uint32 words."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def noise(first, second, tokens):
    """Gumbel noise of token ids under a key of two words, as the contract of the package has it."""
    bits = mixed((mixed(tokens.to(tl.uint32)) ^ first) + second)
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    # -log(1 - w): near 0, where the large values come from, by the series of 2 atanh(w / (2 - w)).
    ratio = uniform / (2.0 - uniform)
    square = ratio * ratio
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))))
    exponential = tl.where(uniform < 0.25, 2.0 * ratio * series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def key_words(keys, row):
    """The two words of a row's key [R, 2] int64."""
    first = tl.load(keys + 2 * row).to(tl.uint32)
    second = tl.load(keys + 2 * row + 1).to(tl.uint32)
    return first, second


@triton.jit
def best_of(scores, tokens, vocabulary):
    """The id with the largest score, the lowest among equals; within the vocabulary whatever the scores."""
    best = tl.max(scores, 0)
    return tl.minimum(tl.min(tl.where(scores == best, tokens, vocabulary), 0), vocabulary - 1)


@triton.jit
def share(values, best, temperature):
    """Probabilities as multiples of the best token's."""
    return tl.exp(tl.div_rn(values, temperature) - best)


@triton.jit
def between(low, high, WAYS: tl.constexpr):
    """WAYS thresholds above `low`, evenly up to `high`: [WAYS] int64."""
    return low + ((high - low) * (tl.arange(0, WAYS) + 1) + WAYS - 1) // WAYS


@triton.jit
def narrowed(low, high, thresholds, held):
    """The bounds of the largest threshold that holds, `held` being true up to it and false above."""
    below = tl.max(tl.where(held, thresholds, low), 0)
    return below, tl.minimum(high, tl.min(tl.where(held, high, thresholds - 1), 0))


@triton.jit
def counts_above(values, size, thresholds, WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the `size` numbers lie at or above each ordered threshold: [WAYS] int32."""
    counts = tl.zeros([WAYS], tl.int32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(values + place, mask=place < size, other=float("-inf"))
        kept = (place < size)[:, None] & (ordered(numbers)[:, None] >= thresholds[None, :])
        counts += tl.sum(kept.to(tl.int32), 0)
    return counts


@triton.jit
def masses_above(values, size, thresholds, best, temperature, WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of their shares: [WAYS] float32."""
    masses = tl.zeros([WAYS], tl.float32)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(values + place, mask=place < size, other=float("-inf"))
        shares = share(numbers, best, temperature)
        kept = ordered(numbers)[:, None] >= thresholds[None, :]
        masses += tl.sum(tl.where(kept, shares[:, None], 0.0), 0)
    return masses
