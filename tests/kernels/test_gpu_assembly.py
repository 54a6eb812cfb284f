"""The assembly that makes numbers of codes, worked out step by step: no interpreter of Triton's runs it."""

import re

import pytest
import torch

from batchgen.kernels.kv_format import gpu_assembly as made


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """A register as two numbers, the lower half first."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def multiply_add(a: int, b: int, c: int, dtype: torch.dtype) -> int:
    product = (halves(a, dtype).double() * halves(b, dtype).double() + halves(c, dtype).double()).to(dtype)
    low, high = (int(part) & 0xFFFF for part in product.view(torch.int16))
    return low | high << 16


def permute(a: int, b: int, selector: int) -> int:
    """Bytes by their numbers; from 8 on the sign of one, eight times."""
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    source += bytes(255 * (byte >> 7) for byte in source)
    return sum(source[selector >> 4 * place & 15] << 8 * place for place in range(4))


def look_up(a: int, b: int, c: int, table: int) -> int:
    """Bit by bit: what the table has for the three bits."""
    return sum((table >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit for bit in range(32))


def execute(assembly: str, word: int, dtype: torch.dtype) -> list[int]:
    """The registers it makes, $0 and maybe $1, from the one behind them."""
    results = [f"${number}" for number in range(2 if "$2" in assembly else 1)]
    registers = {f"${len(results)}": word}
    operations = {
        "mov": lambda a: a,
        "prmt": permute,
        "shr": lambda a, b: a >> b,
        "shl": lambda a, b: a << b,
        "xor": lambda a, b: a ^ b,
        "lop3": look_up,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "fma": lambda a, b, c: multiply_add(a, b, c, dtype),
    }
    for name, kind, operands in re.findall(r"(\w+)\.([\w.]+)\s+([^;]+);", assembly.replace(".reg .b32", "reg.b32")):
        if name == "reg":
            continue
        assert name != "fma" or kind == {torch.bfloat16: "rn.bf16x2", torch.float16: "rn.f16x2"}[dtype]
        to, *given = (operand.strip() for operand in operands.split(","))
        values = [registers[operand] if operand in registers else int(operand, 0) for operand in given]
        registers[to] = operations[name](*values) & 0xFFFFFFFF
    return [registers[result] for result in results]


def numbers_of(codes: list[int], assembly: str, dtype: torch.dtype) -> torch.Tensor:
    """The codes four at a time; a multiple of four."""
    words = [int.from_bytes(bytes(codes[first : first + 4]), "little") for first in range(0, len(codes), 4)]
    return torch.cat([halves(register, dtype) for word in words for register in execute(assembly, word, dtype)])


BYTES = [*range(256), *range(255, -1, -1), *range(0, 256, 3), 0, 255]  # in other company each time
PLAIN = [code for code in BYTES if code & 127 != 127]  # NaN is not written
PAIRS = {
    ("fp8", torch.bfloat16): (made.FIRST_FP8_TO_BFLOAT16, made.SECOND_FP8_TO_BFLOAT16),
    ("fp8", torch.float16): (made.FIRST_FP8_TO_FLOAT16, made.SECOND_FP8_TO_FLOAT16),
    ("int8", torch.bfloat16): (made.FIRST_INT8_TO_BFLOAT16, made.SECOND_INT8_TO_BFLOAT16),
    ("int8", torch.float16): (made.FIRST_INT8_TO_FLOAT16, made.SECOND_INT8_TO_FLOAT16),
}
NUMBERS = {
    "fp8": (PLAIN[: len(PLAIN) // 4 * 4], lambda codes: codes.view(torch.float8_e4m3fn).float()),
    "int8": (BYTES, lambda codes: codes.view(torch.int8)),
    "low": (BYTES, lambda codes: codes & 15),
    "high": (BYTES, lambda codes: codes >> 4),
}
ASSEMBLY = {
    ("fp8", torch.bfloat16): made.FP8_TO_BFLOAT16,
    ("fp8", torch.float16): made.FP8_TO_FLOAT16,
    ("int8", torch.bfloat16): made.INT8_TO_BFLOAT16,
    ("int8", torch.float16): made.INT8_TO_FLOAT16,
    ("low", torch.bfloat16): made.LOW_TO_BFLOAT16,
    ("low", torch.float16): made.LOW_TO_FLOAT16,
    ("high", torch.bfloat16): made.HIGH_TO_BFLOAT16,
    ("high", torch.float16): made.HIGH_TO_FLOAT16,
}


@pytest.mark.parametrize(("kind", "dtype"), ASSEMBLY, ids=str)
def test_every_code_becomes_its_number(kind: str, dtype: torch.dtype) -> None:
    codes, meaning = NUMBERS[kind]
    got = numbers_of(codes, ASSEMBLY[kind, dtype].value, dtype)
    expected = meaning(torch.tensor(codes, dtype=torch.uint8)).to(dtype)
    assert len(got) == len(expected)
    if kind == "fp8":
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), "zeros keep their signs"
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("kind", "dtype"), PAIRS, ids=str)
def test_pairs_of_codes_become_the_first_numbers_or_the_second(kind: str, dtype: torch.dtype) -> None:
    codes, meaning = NUMBERS[kind]
    expected = meaning(torch.tensor(codes, dtype=torch.uint8)).to(dtype)
    for place, assembly in enumerate(PAIRS[kind, dtype]):
        assert torch.equal(numbers_of(codes, assembly.value, dtype), expected[place::2])
