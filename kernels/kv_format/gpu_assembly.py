"""Instructions of the device (PTX) that make 16-bit numbers of four codes at once, or of two, each exact.

Knows bits, not tiles. The last register holds four bytes; $0 and $1 become the numbers of the lower and the upper two.
Of pairs of bytes, which the last register holds two of, $0 becomes the numbers of the first ones, or the second ones.
Conversions of the hardware lead to float16 and from there to bfloat16 number by number, and older chips have none.
"""

from dataclasses import dataclass

import triton.language as tl


@dataclass(frozen=True, slots=True)
class Number:
    """A 16-bit type: how PTX names pairs of it, bits of its exponent's bias and fraction."""

    pair: str
    bias: int
    fraction: int

    def bits(self, value: float) -> int:
        """Of a power of two, or one and an eighth of it, in both halves of a register."""
        sign, size = (0x8000 if value < 0 else 0), abs(value)
        exponent = 0
        while size >= 2:
            size, exponent = size / 2, exponent + 1
        half = sign | (exponent + self.bias) << self.fraction | int((size - 1) * 2**self.fraction)
        return half << 16 | half


BFLOAT16, FLOAT16 = Number("bf16x2", 127, 7), Number("f16x2", 15, 10)
# The bytes of each half of a result: a code below its sign, or below zeros.
SIGNED, PLAIN = (0x9180, 0xB3A2), (0x4140, 0x4342)
SIGNED_OF_PAIRS, PLAIN_OF_PAIRS = (0xA280, 0xB391), (0x4240, 0x4341)
SET = 0xEA  # of the instruction that takes bits of one word and sets those of another


def _assembly(number: Number, halves: tuple[int, ...], first: str, then: str) -> str:
    """`first` makes `word` of the codes; its bytes become halves of `wide`, and `then` makes factors of these: wide *
    by + more.
    """
    lines = [".reg .b32 word, wide, by, more;", first.replace("$codes", f"${len(halves)}")]
    for to, selector in enumerate(halves):
        lines += [f"prmt.b32 wide, word, 0, {selector:#x};", then, f"fma.rn.{number.pair} ${to}, wide, by, more;"]
    return "{ " + " ".join(lines) + " }"


def _fp8(number: Number, halves: tuple[int, ...] = SIGNED) -> str:
    """e4m3: its bits put where those of the number are, the difference of the biases made up for by a product."""
    shift = number.fraction - 3
    factor = number.bits(2.0 ** (number.bias - 7))
    first = f"mov.b32 word, $codes; mov.b32 by, {factor:#x}; mov.b32 more, 0x80008000;"
    kept = 0x80008000 | 0x00010001 * (0x7F << shift)
    return _assembly(number, halves, first, f"shl.b32 wide, wide, {shift}; and.b32 wide, wide, {kept:#x};")


def _int8(number: Number, halves: tuple[int, ...] = PLAIN) -> str:
    """In the fraction of 128 or 1024, which is taken off again. That of bfloat16 has room for seven bits: by the sign,
    256 is taken off instead.
    """
    unit, least = number.bits(1.0), number.bits(2.0**number.fraction)
    if number.fraction > 7:
        first = f"xor.b32 word, $codes, 0x80808080; mov.b32 by, {unit:#x}; mov.b32 more, {number.bits(-1152.0):#x};"
        return _assembly(number, halves, first, f"or.b32 wide, wide, {least:#x};")
    then = f"lop3.b32 more, wide, 0x00800080, {number.bits(-128.0):#x}, {SET:#x};"
    then += f" lop3.b32 wide, wide, 0x007f007f, {least:#x}, {SET:#x};"
    return _assembly(number, halves, f"mov.b32 word, $codes; mov.b32 by, {unit:#x};", then)


def _nibbles(number: Number, shift: int) -> str:
    """The lower or the upper four bits of each byte, likewise."""
    least = 2.0**number.fraction
    first = f"shr.u32 word, $codes, {shift}; mov.b32 by, {number.bits(1.0):#x}; mov.b32 more, {number.bits(-least):#x};"
    return _assembly(number, PLAIN, first, f"lop3.b32 wide, wide, 0x000f000f, {number.bits(least):#x}, {SET:#x};")


FP8_TO_BFLOAT16, FP8_TO_FLOAT16 = (tl.constexpr(_fp8(number)) for number in (BFLOAT16, FLOAT16))
INT8_TO_BFLOAT16, INT8_TO_FLOAT16 = (tl.constexpr(_int8(number)) for number in (BFLOAT16, FLOAT16))
FIRST_FP8_TO_BFLOAT16, SECOND_FP8_TO_BFLOAT16, FIRST_FP8_TO_FLOAT16, SECOND_FP8_TO_FLOAT16 = (
    tl.constexpr(_fp8(number, (half,))) for number in (BFLOAT16, FLOAT16) for half in SIGNED_OF_PAIRS
)
FIRST_INT8_TO_BFLOAT16, SECOND_INT8_TO_BFLOAT16, FIRST_INT8_TO_FLOAT16, SECOND_INT8_TO_FLOAT16 = (
    tl.constexpr(_int8(number, (half,))) for number in (BFLOAT16, FLOAT16) for half in PLAIN_OF_PAIRS
)
LOW_TO_BFLOAT16, LOW_TO_FLOAT16 = (tl.constexpr(_nibbles(number, 0)) for number in (BFLOAT16, FLOAT16))
HIGH_TO_BFLOAT16, HIGH_TO_FLOAT16 = (tl.constexpr(_nibbles(number, 4)) for number in (BFLOAT16, FLOAT16))
