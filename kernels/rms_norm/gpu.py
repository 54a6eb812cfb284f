"""RMS normalisation by Triton: a program holds one row, which is read and written once. Knows strides, not models."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch, power_of_two

NUMBERS_PER_THREAD = 8  # 16 bytes of a 16-bit type
MAX_WARPS = 16


@triton.jit
def normalise(
    x, residual, weight, out, x_stride, x_inner, inner, width, epsilon, ADD: tl.constexpr, WIDTH: tl.constexpr
):
    """Row of x [rows / inner, inner, H]; with ADD the residual [rows, H] grows by x first and is what is normalised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    within = columns < width
    values = tl.load(x + row // inner * x_stride + row % inner * x_inner + columns, mask=within, other=0.0)
    factors = tl.load(weight + columns, mask=within, other=0.0)
    if ADD:
        before = tl.load(residual + row * width + columns, mask=within, other=0.0)
        values = (before.to(tl.float32) + values.to(tl.float32)).to(before.dtype)
        tl.store(residual + row * width + columns, values, mask=within)
    wide = values.to(tl.float32)
    scaled = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + epsilon))
    rounded = scaled.to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + row * width + columns, rounded.to(out.dtype.element_ty), mask=within)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., H] normalised over H and scaled by weight [H]; see the contract."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan(x, out, weight, out, epsilon, add=False).run()
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """residual [T, H] += x in place, and its norm as a new [T, H]; see the contract."""
    out = torch.empty_like(residual)
    plan(x, residual, weight, out, epsilon, add=True).run()
    return out


def plan(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, epsilon: float, *, add: bool) -> Launch:
    """The launch for x [..., H]; `residual` is read and written only with `add`, and is contiguous."""
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    outer, inner, width = rows.shape
    block = power_of_two(width)
    return Launch(
        normalise,
        (outer * inner,),
        (rows, residual, weight.contiguous(), out, rows.stride(0), rows.stride(1), inner, width, epsilon),
        {"ADD": add, "WIDTH": block},
        num_warps=min(MAX_WARPS, max(1, block // (32 * NUMBERS_PER_THREAD))),
    )
