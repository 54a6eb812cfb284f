"""The product of activations and grouped codes by Triton, and the sum of the parts of a split product.

A program holds a tile of outputs times tokens. Codes become matrix operands in registers, so weights cross the shared
memory as they are stored; scales and sums of the next step are fetched while this one is multiplied. Knows forms and
choices, not checkpoints.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch
from .choice import TILE_TOKENS, Choice
from .layout import GroupedWeight

COLUMNS = 512  # of a program that adds up parts
SAME = "same"  # codes that are operands as they are
LARGEST_TILE = tl.constexpr(TILE_TOKENS[-1])


@triton.constexpr_function
def two_codes(plane, magic):
    """Two 16-bit words at once: the nibbles of the plane, set into the fraction of a float."""
    return f"shr.b32 $0, $1, {4 * plane}; lop3.b32 $0, $0, 0x000f000f, {magic:#x}, 0xea;"


@triton.jit
def nibbles(words, PLANE: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr):
    """4-bit codes less ZERO as numbers: a code in the low bits of a fraction is that many steps above 128 or 1024."""
    if NUMBERS == "fp32":
        numbers = ((words >> (4 * PLANE)) & 15).to(tl.float32) - ZERO
    elif NUMBERS == "bf16":
        if PACKED:
            set_brain: tl.constexpr = two_codes(PLANE, 0x43004300)
            raised = tl.inline_asm_elementwise(set_brain, "=r,r", [words], tl.bfloat16, True, 2)
        else:
            raised = (((words >> (4 * PLANE)) & 15) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        numbers = raised - tl.full([], 128 + ZERO, tl.bfloat16)
    else:
        if PACKED:
            set_half: tl.constexpr = two_codes(PLANE, 0x64006400)
            raised = tl.inline_asm_elementwise(set_half, "=r,r", [words], tl.float16, True, 2)
        else:
            raised = (((words >> (4 * PLANE)) & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
        numbers = raised - tl.full([], 1024 + ZERO, tl.float16)
    return numbers


@triton.constexpr_function
def four_codes(plane):
    """Four 16-bit words at once: the nibbles of the plane, one in each byte."""
    shift = "shr.b32 $0, $0, 4; " if plane % 2 else ""
    return f"prmt.b32 $0, $1, $2, {0x7531 if plane >= 2 else 0x6420:#x}; {shift}and.b32 $0, $0, 0x0f0f0f0f;"


@triton.jit
def nibbles_as_floats(words, PLANE: tl.constexpr, PACKED: tl.constexpr):
    """4-bit codes in units of 2^-9, as e4m3: below 8 subnormal ones, from 8 on those of the least exponent."""
    if PACKED:
        gather: tl.constexpr = four_codes(PLANE)
        bits = tl.inline_asm_elementwise(gather, "=r,r,r", [words], tl.int8, True, 4)
    else:
        bits = ((words >> (4 * PLANE)) & 15).to(tl.int8)
    return bits.to(tl.float8e4nv, bitcast=True)


@triton.jit
def eight_bit_floats(codes, NUMBERS: tl.constexpr):
    """e4m3 by its bits, which devices without such floats have to take: exponents are put right by a product."""
    if NUMBERS == "fp32":
        wide = codes.to(tl.uint32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        numbers = bits.to(tl.float32, bitcast=True) * tl.full([], 2.0**120, tl.float32)
    elif NUMBERS == "bf16":
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
        numbers = bits.to(tl.bfloat16, bitcast=True) * tl.full([], 2.0**120, tl.bfloat16)
    else:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = bits.to(tl.float16, bitcast=True) * tl.full([], 256.0, tl.float16)
    return numbers


@triton.jit
def operand(
    words, PLANE: tl.constexpr, KIND: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr
):
    """A plane of a step as the matrix instructions take it."""
    if KIND == "int4" and NUMBERS == "e4m3":
        numbers = nibbles_as_floats(words, PLANE, PACKED)
    elif KIND == "int4":
        numbers = nibbles(words, PLANE, NUMBERS, ZERO, PACKED)
    elif KIND == "e4m3":
        numbers = eight_bit_floats(words, NUMBERS)
    elif KIND == "same":
        numbers = words
    elif NUMBERS == "fp32":
        numbers = words.to(tl.float32)
    elif NUMBERS == "bf16":
        numbers = words.to(tl.bfloat16)
    else:
        numbers = words.to(tl.float16)
    return numbers


@triton.jit
def column(tile, PLACE: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """One of the COUNT columns of a tile [ROWS, COUNT], float32."""
    if COUNT == 1:
        chosen = tl.reshape(tile, [ROWS])
    elif COUNT == 2:
        first, second = tl.split(tile)
        chosen = first if PLACE == 0 else second
    else:
        even, odd = tl.split(tl.reshape(tile, [ROWS, 2, 2]))
        first, second = tl.split(even if PLACE % 2 == 0 else odd)
        chosen = first if PLACE // 2 == 0 else second
    return chosen.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def multiply(
    x, x_stride, token_scale, terms, codes, plane_stride, row_stride, scale, minimum, bias, out,
    tokens, outputs, inputs, steps, steps_per_split,
    KIND: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr,
    WIDTH: tl.constexpr, PLANES: tl.constexpr, CHAIN: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr,
    MINIMUM: tl.constexpr, TERMS: tl.constexpr, TOKEN_SCALE: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of out [tokens, outputs], or of part `program_id(2)` of it: out [splits, tokens, outputs] float32.

    terms [steps, S, tokens filled up] float32: with SUMS the sums of the activations of each chain ([1, 1, tokens] with
    one group), with TERMS the scales of the activations of each chain.
    """
    SCALES: tl.constexpr = PLANES // CHAIN
    NIBBLES: tl.constexpr = KIND == "int4"
    FLOATS: tl.constexpr = NUMBERS == "e4m3"
    SUMS: tl.constexpr = MINIMUM or (NIBBLES and FLOATS)
    BELOW: tl.constexpr = ZERO if NIBBLES and FLOATS else 0  # what is still to be taken from codes
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known_token, known_row = tl.minimum(token, tokens - 1), tl.minimum(row, outputs - 1)
    place, chain = tl.arange(0, WIDTH), tl.arange(0, SCALES)
    first = tl.program_id(2) * steps_per_split
    last = tl.minimum(first + steps_per_split, steps)
    words_per_step = plane_stride if NIBBLES else plane_stride * PLANES
    code = codes + first.to(tl.int64) * words_per_step + known_row[:, None].to(tl.int64) * row_stride + place[None, :]
    number = x + known_token[None, :].to(tl.int64) * x_stride + (first * PLANES * WIDTH + place)[:, None]
    factor = scale + (first * outputs + known_row)[:, None] * SCALES + chain[None, :]
    least = minimum + (first * outputs + known_row)[:, None] * SCALES + chain[None, :]
    filled = (tokens + LARGEST_TILE - 1) // LARGEST_TILE * LARGEST_TILE
    total = tl.zeros([OUTPUTS, TOKENS], tl.int32 if NUMBERS == "whole" and not GROUPED else tl.float32)
    if GROUPED:
        next_factors = tl.load(factor)
        if MINIMUM:
            next_least = tl.load(least)
    for step in range(first, last):
        if GROUPED:
            more = step + 1 < last
            factors = next_factors
            factor += outputs * SCALES
            next_factors = tl.load(factor, mask=more, other=0.0)
            if MINIMUM:
                smallest = next_least
                least += outputs * SCALES
                next_least = tl.load(least, mask=more, other=0.0)
        words = tl.load(code)
        for plane in tl.static_range(PLANES):
            if plane > 0 and not NIBBLES:
                words = tl.load(code + plane * plane_stride)
            if EVEN:
                numbers = tl.load(number + plane * WIDTH)
            else:
                left = inputs - (step * PLANES + plane) * WIDTH
                numbers = tl.load(number + plane * WIDTH, mask=place[:, None] < left, other=0.0)
            weights = operand(words, plane, KIND, NUMBERS, ZERO, PACKED)
            if not GROUPED and FLOATS:
                total += tl.dot(weights, numbers)
            elif not GROUPED:
                total = tl.dot(weights, numbers, total, input_precision="ieee", out_dtype=total.dtype)
            else:
                if plane % CHAIN == 0:
                    if SUMS or TERMS:
                        by_token = tl.load(terms + (step * SCALES + plane // CHAIN) * filled + token)[None, :]
                    product = tl.dot(weights, numbers, input_precision="ieee")
                else:
                    product = tl.dot(weights, numbers, product, input_precision="ieee")
                if plane % CHAIN == CHAIN - 1:
                    by_row = column(factors, plane // CHAIN, SCALES, OUTPUTS)[:, None]
                    if BELOW:
                        product -= BELOW * by_token
                    if TERMS:
                        total += product * (by_row * by_token)
                    else:
                        total += product * by_row
                    if MINIMUM:
                        total += column(smallest, plane // CHAIN, SCALES, OUTPUTS)[:, None] * by_token
        code += words_per_step
        number += PLANES * WIDTH
    result = total.to(tl.float32)
    whole = tl.program_id(2) == 0
    if not GROUPED:
        if SUMS:
            sums = tl.load(terms + known_token, mask=(token < tokens) & whole, other=0.0)[None, :]
        if BELOW:
            result -= BELOW * sums
        result *= tl.load(scale + known_row).to(tl.float32)[:, None]
        if MINIMUM:
            result += tl.load(minimum + known_row).to(tl.float32)[:, None] * sums
    if TOKEN_SCALE:
        result *= tl.load(token_scale + known_token)[None, :]
    if BIAS:
        result += tl.load(bias + known_row, mask=(row < outputs) & whole, other=0.0).to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * outputs + row[:, None]
    if SPLIT:
        target += tl.program_id(2).to(tl.int64) * tokens * outputs
    tl.store(target, result.to(out.dtype.element_ty), mask=(row[:, None] < outputs) & (token[None, :] < tokens))


@triton.jit
def add_parts(parts, out, size, splits, COLUMNS: tl.constexpr):
    """out [size] = the sum of parts [splits, size], in order."""
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@dataclass(frozen=True, slots=True)
class Activations:
    """x [T, H] as it is, or codes [T, H filled up] with what belongs to them.

    token_scale [T] or None; terms [steps * S or 1, T filled up] float32: sums of chains, or their scales (`scaled`), or
    None. Between 8-bit floats and 4-bit codes, which are read in units of 2^-9, scales and sums are in such units.
    """

    numbers: Tensor
    token_scale: Tensor | None = None
    terms: Tensor | None = None
    scaled: bool = False


_NUMBERS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "whole",
    torch.float8_e4m3fn: "e4m3",
}


def packed() -> bool:
    """Whether codes are unpacked two at a time, by instructions the interpreter does not know."""
    return not triton.knobs.runtime.interpret


def product(x: Activations, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype, choice: Choice) -> Tensor:
    """[T, O] in `dtype` by tiles, or by parts and their sum."""
    outputs, tokens = weight.shape[0], len(x.numbers)
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.numbers.device)
    if choice.splits == 1:
        plan(x, weight, bias, out, choice).run()
    else:
        parts = torch.empty((choice.splits, tokens, outputs), dtype=torch.float32, device=out.device)
        plan(x, weight, bias, parts, choice).run()
        plan_sum(parts, out).run()
    return out


def plan(x: Activations, weight: GroupedWeight, bias: Tensor | None, out: Tensor, choice: Choice) -> Launch:
    """The launch of `multiply`; out [T, O], or [splits, T, O] float32."""
    form, outputs, tokens = weight.form, weight.shape[0], len(x.numbers)
    per_split = -(-weight.steps // choice.splits)
    kind = SAME if x.numbers.itemsize == weight.codes.itemsize == 1 else weight.kind
    codes = weight.codes.view(x.numbers.dtype) if kind == SAME else weight.codes
    grid = (-(-tokens // choice.tokens), -(-outputs // choice.outputs), choice.splits)
    any_tensor = out  # where there is none; not read
    arguments = (
        *(x.numbers, x.numbers.stride(0)),
        *(any_tensor if part is None else part for part in (x.token_scale, x.terms)),
        *(codes, *weight.strides(), weight.scale),
        *(any_tensor if part is None else part for part in (weight.minimum, bias)),
        *(out, tokens, outputs, x.numbers.shape[1], weight.steps, per_split),
    )
    constants = {
        "KIND": kind,
        "NUMBERS": _NUMBERS[x.numbers.dtype],
        "ZERO": weight.zero,
        "PACKED": packed(),
        "WIDTH": form.width,
        "PLANES": form.planes,
        "CHAIN": form.chain,
        "GROUPED": form.grouped,
        "EVEN": x.numbers.shape[1] == weight.steps * form.step,
        "MINIMUM": weight.minimum is not None,
        "TERMS": x.scaled,
        "TOKEN_SCALE": x.token_scale is not None,
        "BIAS": bias is not None,
        "SPLIT": choice.splits > 1,
        "TOKENS": choice.tokens,
        "OUTPUTS": choice.outputs,
    }
    return Launch(multiply, grid, arguments, constants, choice.warps, choice.stages)


def plan_sum(parts: Tensor, out: Tensor) -> Launch:
    """The launch that adds parts [splits, T, O] up to out [T, O]."""
    return Launch(
        add_parts, (-(-out.numel() // COLUMNS),), (parts, out, out.numel(), parts.shape[0]), {"COLUMNS": COLUMNS}
    )
