"""A grouped weight expanded to plain numbers by Triton, for the vendor's product. Knows forms, not batches."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..launch import Launch
from .gpu_operands import column
from .layout import GroupedWeight

ROWS = 64  # outputs of a program
_NUMBERS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def expand(
    codes, plane_stride, row_stride, scale, minimum, out, outputs, inputs,
    KIND: tl.constexpr, ZERO: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr, CHAIN: tl.constexpr,
    GROUPED: tl.constexpr, MINIMUM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of one step, out [outputs, inputs]: computed in float32, rounded once."""
    SCALES: tl.constexpr = PLANES // CHAIN
    NIBBLES: tl.constexpr = KIND == "int4"
    step = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, outputs - 1).to(tl.int64)
    place, chain = tl.arange(0, WIDTH), tl.arange(0, SCALES)
    number = (step if GROUPED else 0) * outputs + known
    factors = tl.load(scale + number[:, None] * SCALES + chain[None, :])
    if MINIMUM:
        least = tl.load(minimum + number[:, None] * SCALES + chain[None, :])
    code = codes + step * plane_stride * (1 if NIBBLES else PLANES) + known[:, None] * row_stride + place[None, :]
    if NIBBLES:
        words = tl.load(code)
    for plane in tl.static_range(PLANES):
        if NIBBLES:
            values = ((words >> (4 * plane)) & 15).to(tl.float32) - ZERO
        elif KIND == "e4m3":
            wide = tl.load(code + plane * plane_stride).to(tl.uint32)
            bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
            values = bits.to(tl.float32, bitcast=True) * tl.full([], 2.0**120, tl.float32)
        else:
            values = tl.load(code + plane * plane_stride).to(tl.float32)
        values = values * column(factors, plane // CHAIN, SCALES, ROWS)[:, None]
        if MINIMUM:
            values += column(least, plane // CHAIN, SCALES, ROWS)[:, None]
        column_number = (step * PLANES + plane) * WIDTH + place
        stored = (row[:, None] < outputs) & (column_number[None, :] < inputs)
        target = out + row[:, None].to(tl.int64) * inputs + column_number[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=stored)


def product(x: Tensor, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight, its values rounded to the dtype of x, as [T, O] in `dtype`."""
    scratch = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
    plan(weight, scratch).run()
    return multiplied(x, scratch, bias, dtype)


def multiplied(x: Tensor, values: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times plain values [O, H] of its dtype, plus bias float32, as [T, O] in `dtype`."""
    own = None if bias is None else bias.to(dtype)
    if dtype == x.dtype:
        return functional.linear(x, values, own)
    if not x.is_cuda:  # where torch has no product of narrow numbers with wide results
        return functional.linear(x.to(dtype), values.to(dtype), own)
    out: Tensor = torch.mm(x, values.t(), out_dtype=dtype)
    return out if own is None else out.add_(own)


def plan(weight: GroupedWeight, out: Tensor) -> Launch:
    """The launch that expands a weight to out [O, H]."""
    form, (outputs, inputs) = weight.form, weight.shape
    minimum = out if weight.minimum is None else weight.minimum
    constants = {
        "KIND": weight.kind,
        "ZERO": weight.zero,
        "WIDTH": form.width,
        "PLANES": form.planes,
        "CHAIN": form.chain,
        "GROUPED": form.grouped,
        "MINIMUM": weight.minimum is not None,
        "ROWS": ROWS,
    }
    arguments = (weight.codes, *weight.strides(), weight.scale, minimum, out, outputs, inputs)
    return Launch(expand, (weight.steps, -(-outputs // ROWS)), arguments, constants, num_warps=4)
