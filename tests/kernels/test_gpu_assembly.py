"""The assembly of e4m3 conversions, worked out instruction by instruction: no interpreter of Triton's runs it."""

import re

import pytest
import torch

from batchgen.kernels.kv_format import gpu


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """A register as two numbers, the lower half first."""
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16).view(dtype)


def multiply_add(a: int, b: int, c: int, dtype: torch.dtype) -> int:
    product = (halves(a, dtype).double() * halves(b, dtype).double() + halves(c, dtype).double()).to(dtype)
    low, high = (int(part) & 0xFFFF for part in product.view(torch.int16))
    return low | high << 16


def permute(a: int, b: int, selector: int) -> int:
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return sum(source[selector >> 4 * place & 7] << 8 * place for place in range(4))


def execute(assembly: str, word: int, dtype: torch.dtype) -> tuple[int, int]:
    """The registers $0 and $1 after the assembly ran on $2."""
    registers = {"$2": word}
    operations = {
        "mov": lambda a: a,
        "prmt": permute,
        "shr": lambda a, b: a >> b,
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
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize(
    ("assembly", "dtype"), [(gpu.FP8_TO_BFLOAT16, torch.bfloat16), (gpu.FP8_TO_FLOAT16, torch.float16)], ids=str
)
def test_every_code_becomes_its_number(assembly, dtype: torch.dtype) -> None:
    codes = [code for code in range(256) if code & 127 != 127]  # NaN is not written
    codes += codes[:2]
    for first in range(0, len(codes), 4):
        four = codes[first : first + 4]
        word = int.from_bytes(bytes(four), "little")
        got = torch.cat([halves(register, dtype) for register in execute(assembly.value, word, dtype)])
        expected = torch.tensor(four, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
