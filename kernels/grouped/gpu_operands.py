"""Grouped codes as operands of matrix products, in Triton: bits put in place in registers. Knows no scales, no loops.

Two or four codes are made at once by instructions of the device; the interpreter has none, and makes them one by one.
"""

import triton
import triton.language as tl


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
def operand(words, PLANE: tl.constexpr, V: tl.constexpr):
    """A plane of a step as the matrix instructions take it: codes of V's kind beside activations of its numbers."""
    KIND: tl.constexpr = V.kind
    NUMBERS: tl.constexpr = V.numbers
    ZERO: tl.constexpr = V.zero
    PACKED: tl.constexpr = V.packed
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
