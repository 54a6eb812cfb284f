"""The gated activation by Triton: each program a piece of one row, 16 bytes a thread. Knows strides, not models."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch

COLUMNS = 1024  # of a program: 4 warps with 8 numbers a thread


@triton.jit
def gate(gate_up, out, stride, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    opened = tl.load(gate_up + row * stride + columns, mask=within, other=0.0)
    up = tl.load(gate_up + row * stride + width + columns, mask=within, other=0.0)
    wide = opened.to(tl.float32)
    silu = wide / (1.0 + tl.exp(-wide))
    product = silu.to(opened.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + columns, product.to(out.dtype.element_ty), mask=within)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2F] as [T, F]; see the contract."""
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    plan(gate_up, out).run()
    return out


def plan(gate_up: Tensor, out: Tensor) -> Launch:
    """The launch for gate_up [T, 2F] and out [T, F]."""
    rows = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    width = out.shape[1]
    grid = (len(rows), triton.cdiv(width, COLUMNS))
    return Launch(gate, grid, (rows, out, rows.stride(0), width), {"COLUMNS": COLUMNS})
