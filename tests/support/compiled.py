"""Compiles a planned launch for a GPU that is not there, and reads what the compiler made of it.

Triton compiles from types alone: the tensors of the launch may be on the meta device. What a program needs of registers
and of the stack, where spilled registers go, is read from the machine code with the vendor's own tool.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchgen.kernels.kv_format import FORMATS, Pages
from batchgen.kernels.launch import Launch

CAPABILITIES = (80, 90, 100)
OF_WORKSTATIONS = (89, 120)  # a little over half the shared memory
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes of one program
MATRIX_INSTRUCTION = {
    80: r"\bmma\.sync",
    89: r"\bmma\.sync",
    120: r"\bmma\.sync",
    90: r"\bwgmma\.mma_async",
    100: r"\btcgen05\.mma",
}
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Program:
    """Compiled for one capability. `stack` in bytes a thread: above 0, registers were spilled."""

    capability: int
    ptx: str
    shared: int
    registers: int
    stack: int

    def matrix_instructions(self, capability: int | None = None) -> int:
        """Of the kind that reaches the rate of its capability, or of an older one."""
        return len(re.findall(MATRIX_INSTRUCTION[capability or self.capability], self.ptx))

    def fp8_instructions(self) -> int:
        """Matrix instructions that multiply 8-bit floats."""
        return len(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.]*\.e4m3|tcgen05\.mma[\w.:]*kind::f8f6f4", self.ptx))

    def fused(self) -> int:
        """Products and sums of float32 that are rounded once."""
        return len(re.findall(r"\bfma\.rn\.(?:ftz\.)?f32", self.ptx))

    def byte_loads(self) -> int:
        """Loads of single bytes from shared memory: codes that were not made numbers before they were transposed."""
        return len(re.findall(r"ld\.shared[\w.:]*\.[bsu]8\b", self.ptx))

    def wide_loads(self) -> int:
        """Loads and asynchronous copies of 8 or 16 bytes a thread."""
        vector = r"ld\.global[\w.:]*\.v[24]\.b(32|64)|cp\.async\.c[ag]\.[^;]*, 0x(8|10)(?![0-9a-f])"
        return len(re.findall(vector, self.ptx))


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def empty_pages(name: str, num_heads: int, head_dim: int) -> Pages:
    """Pages of a KV format, without memory."""
    format, sizes = FORMATS[name], (num_heads, 4096, 16)
    scales = empty(*sizes, format.num_scales(head_dim), dtype=torch.float32)
    return Pages(format, empty(*sizes, format.width(head_dim), dtype=format.dtype), scales, head_dim)


def compile_launch(launch: Launch, capability: int) -> Program:
    """The launch's kernel as it would be compiled on a device of this capability (90 for H100 and H200)."""
    source = ASTSource(launch.kernel, *_signature(launch))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options())
    registers, stack = _resources(compiled.asm["cubin"])
    return Program(capability, compiled.asm["ptx"], compiled.metadata.shared, registers, stack)


def _signature(launch: Launch) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Types, constants and alignments of the parameters, by the rules of a launch."""
    names = launch.kernel.arg_names
    types, constants, attributes = {}, {}, {}
    for place, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        types[name], aligned = _type(value)
        if launch.kernel.params[place].do_not_specialize:
            types[name], aligned = "i32", False
        if types[name] == "constexpr":
            constants[(place,)] = value
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    for name, value in launch.constants.items():
        types[name] = "constexpr"
        constants[(names.index(name),)] = value
    return {name: types[name] for name in names}, constants, attributes


def _type(value: Any) -> tuple[str, bool]:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}", True
    if value is None or value is True or value is False or (isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, int):
        return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0
    return "fp32", False


@cache
def _dump_tool() -> str:
    return str(triton.knobs.nvidia.cuobjdump.path)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run([_dump_tool(), "-res-usage", path], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
