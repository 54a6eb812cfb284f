"""The product of activations and grouped codes in Triton, and the sum of the parts of a split product.

A program holds a tile of outputs times tokens. Codes become matrix operands in registers, so weights cross the shared
memory as they are stored; scales and sums of the next step are fetched while this one is multiplied. Knows forms, not
how they are chosen.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from .choice import TILE_TOKENS
from .gpu_operands import column, operand

LARGEST_TILE = tl.constexpr(TILE_TOKENS[-1])
CHAINS = tl.constexpr(16)  # whose sums are multiplied at once
MANY = 64 * 128  # numbers of a tile from which on a product of sums costs less than to add them chain by chain


@dataclass(frozen=True, slots=True)
class Variant:
    """What `multiply` is compiled for."""

    kind: str  # of the codes
    numbers: str  # of the activations
    zero: int  # what codes count from
    packed: bool  # codes are made operands several at a time
    width: int  # inputs of a plane
    planes: int  # of a step
    chain: int  # planes with one scale
    grouped: bool  # an output has more than one scale
    even: bool  # steps end where the inputs do
    minimum: bool
    scaled: bool  # `terms` has scales of activations, not their sums
    token_scale: bool
    bias: bool
    split: bool  # `out` has a part for each program along the inputs
    tokens: int  # of a tile
    outputs: int

    @property
    def scales(self) -> int:
        """Of an output in a step."""
        return self.planes // self.chain

    @property
    def nibbles(self) -> bool:
        return self.kind == "int4"

    @property
    def floats(self) -> bool:
        """Products of 8-bit floats, whose sums must be moved to full ones now and then."""
        return self.numbers == "e4m3"

    @property
    def sums(self) -> bool:
        """Sums of activations are wanted."""
        return self.minimum or (self.nibbles and self.floats)

    @property
    def behind(self) -> bool:
        """Sums are added behind the loop."""
        return self.sums and self.grouped and self.tokens * self.outputs >= MANY

    @property
    def below(self) -> int:
        """What is still to be taken from codes."""
        return self.zero if self.nibbles and self.floats else 0


@triton.jit(do_not_specialize=["tokens"])
def multiply(
    x, x_stride, token_scale, terms, codes, plane_stride, row_stride, scale, minimum, bias, out,
    tokens, outputs, inputs, steps, steps_per_split, V: tl.constexpr,
):  # fmt: skip
    """A tile of out [tokens, outputs], or of part `program_id(2)` of it: out [splits, tokens, outputs] float32.

    terms [steps, S, tokens filled up] float32: the sums of the activations of each chain ([1, 1, tokens] with one
    group), or, `scaled`, the scales of the activations of each chain.
    """
    token = tl.program_id(0) * V.tokens + tl.arange(0, V.tokens)
    row = tl.program_id(1) * V.outputs + tl.arange(0, V.outputs)
    known_token, known_row = tl.minimum(token, tokens - 1), tl.minimum(row, outputs - 1)
    place = tl.arange(0, V.width)
    first = tl.program_id(2) * steps_per_split
    last = tl.minimum(first + steps_per_split, steps)
    words_per_step = plane_stride if V.nibbles else plane_stride * V.planes
    code = codes + first.to(tl.int64) * words_per_step + known_row[:, None].to(tl.int64) * row_stride + place[None, :]
    number = x + known_token[None, :].to(tl.int64) * x_stride + (first * V.planes * V.width + place)[:, None]
    operands = (code, number, place, inputs, plane_stride, words_per_step)
    if V.grouped:
        chain = tl.arange(0, V.scales)[None, :]
        factor = scale + (first * outputs + known_row)[:, None] * V.scales + chain
        least = minimum + (first * outputs + known_row)[:, None] * V.scales + chain
        filled = (tokens + LARGEST_TILE - 1) // LARGEST_TILE * LARGEST_TILE
        result = sum_of_chains(first, last, operands, factor, least, outputs, terms, token, filled, V)
        if V.behind:
            result = add_sums(result, first, last, scale, minimum, known_row, outputs, terms, token, filled, V)
    else:
        whole = plain_sum(first, last, operands, V)
        result = scaled_once(whole, scale, minimum, terms, known_row, known_token, token < tokens, V)
    if V.token_scale:
        result *= tl.load(token_scale + known_token)[None, :]
    if V.bias:
        added = tl.load(bias + known_row, mask=(row < outputs) & (tl.program_id(2) == 0), other=0.0)
        result += added.to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * outputs + row[:, None]
    if V.split:
        target += tl.program_id(2).to(tl.int64) * tokens * outputs
    tl.store(target, result.to(out.dtype.element_ty), mask=(row[:, None] < outputs) & (token[None, :] < tokens))


@triton.jit
def load_words(words, code, plane_stride, PLANE: tl.constexpr, V: tl.constexpr):
    """The codes of a plane; all planes of nibbles lie in the words of the first."""
    if PLANE == 0 or not V.nibbles:
        words = tl.load(code + PLANE * plane_stride)
    return words


@triton.jit
def load_numbers(number, place, inputs, step, PLANE: tl.constexpr, V: tl.constexpr):
    """The activations of a plane [width, tokens], zeros behind the last."""
    if V.even:
        numbers = tl.load(number + PLANE * V.width)
    else:
        left = inputs - (step * V.planes + PLANE) * V.width
        numbers = tl.load(number + PLANE * V.width, mask=place[:, None] < left, other=0.0)
    return numbers


@triton.jit
def plain_sum(first, last, operands, V: tl.constexpr):
    """Products over the steps, without scales: [outputs, tokens], whole numbers where both factors are."""
    code, number, place, inputs, plane_stride, words_per_step = operands
    PLANES: tl.constexpr = V.planes
    total = tl.full([V.outputs, V.tokens], 0, tl.int32 if V.numbers == "whole" else tl.float32)
    for step in range(first, last):
        words = tl.load(code)
        for plane in tl.static_range(PLANES):
            words = load_words(words, code, plane_stride, plane, V)
            numbers = load_numbers(number, place, inputs, step, plane, V)
            weights = operand(words, plane, V)
            if V.floats:
                total += tl.dot(weights, numbers)
            else:
                total = tl.dot(weights, numbers, total, input_precision="ieee", out_dtype=total.dtype)
        code += words_per_step
        number += V.planes * V.width
    return total


@triton.jit
def scaled_once(total, scale, minimum, terms, row, token, known, V: tl.constexpr):
    """The sums of one group, scaled; the first of split programs adds what belongs to all inputs."""
    result = total.to(tl.float32)
    if V.sums:
        sums = tl.load(terms + token, mask=known & (tl.program_id(2) == 0), other=0.0)[None, :]
    if V.below:
        result -= V.below * sums
    result *= tl.load(scale + row).to(tl.float32)[:, None]
    if V.minimum:
        result += tl.load(minimum + row).to(tl.float32)[:, None] * sums
    return result


@triton.jit
def sum_of_chains(first, last, operands, factor, least, outputs, terms, token, filled, V: tl.constexpr):
    """Products over the steps, each chain of planes scaled by itself: [outputs, tokens] float32.

    factor, least [outputs, S]: where the scales, and the minima, of the first step stand.
    """
    code, number, place, inputs, plane_stride, words_per_step = operands
    PLANES: tl.constexpr = V.planes
    total = tl.full([V.outputs, V.tokens], 0.0, tl.float32)
    SUMS: tl.constexpr = V.sums and not V.behind
    next_factors = tl.load(factor)
    if SUMS and V.minimum:
        next_least = tl.load(least)
    for step in range(first, last):
        more = step + 1 < last
        factors = next_factors
        factor += outputs * V.scales
        next_factors = tl.load(factor, mask=more, other=0.0)
        if SUMS and V.minimum:
            smallest = next_least
            least += outputs * V.scales
            next_least = tl.load(least, mask=more, other=0.0)
        words = tl.load(code)
        for plane in tl.static_range(PLANES):
            words = load_words(words, code, plane_stride, plane, V)
            numbers = load_numbers(number, place, inputs, step, plane, V)
            weights = operand(words, plane, V)
            if plane % V.chain == 0:
                if SUMS or V.scaled:
                    by_token = tl.load(terms + (step * V.scales + plane // V.chain) * filled + token)[None, :]
                product = tl.dot(weights, numbers, input_precision="ieee")
            else:
                product = tl.dot(weights, numbers, product, input_precision="ieee")
            if plane % V.chain == V.chain - 1:
                by_row = column(factors, plane // V.chain, V.scales, V.outputs)[:, None]
                if SUMS and V.below:
                    product -= V.below * by_token
                if V.scaled:
                    total += product * (by_row * by_token)
                else:
                    total += product * by_row
                if SUMS and V.minimum:
                    total += column(smallest, plane // V.chain, V.scales, V.outputs)[:, None] * by_token
        code += words_per_step
        number += V.planes * V.width
    return total


@triton.jit
def add_sums(total, first, last, scale, minimum, row, outputs, terms, token, filled, V: tl.constexpr):
    """The total and what belongs to the sums of activations: minima times these, or scales times what codes count from.

    A product of few inputs behind the loop; in it these would be as many instructions as the scales. Matrix units take
    the upper part of a float32, which is all of a scale of 16 bits; sums go there in two parts.
    """
    lane = tl.arange(0, CHAINS)
    end = last * V.scales
    for begin in range(first * V.scales, end, CHAINS):
        chain = begin + lane
        place = (chain // V.scales * outputs)[None, :] + row[:, None]
        place = place * V.scales + (chain % V.scales)[None, :]
        if V.minimum:
            factors = tl.load(minimum + place, mask=(chain < end)[None, :], other=0.0).to(tl.float32)
        else:
            factors = tl.load(scale + place, mask=(chain < end)[None, :], other=0.0).to(tl.float32) * -V.below
        sums = tl.load(terms + chain[:, None] * filled + token[None, :], mask=(chain < end)[:, None], other=0.0)
        high = upper_part(sums)
        if scale.dtype.element_ty.primitive_bitwidth > 16:
            total = tl.dot(factors - upper_part(factors), high, total, input_precision="tf32")
            factors = upper_part(factors)
        total = tl.dot(factors, sums - high, total, input_precision="tf32")
        total = tl.dot(factors, high, total, input_precision="tf32")
    return total


@triton.jit
def upper_part(numbers):
    """What matrix units take of float32: the sign, the exponent and ten bits."""
    return (numbers.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def add_parts(parts, out, size, splits, COLUMNS: tl.constexpr):
    """out [size] = the sum of parts [splits, size], in order."""
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)
