"""RMS normalisation by the native library. Knows strides and the C interface."""

from typing import Any

import torch
from torch import Tensor

from ..native.library import NUMBERS, arguments
from . import reference


def rms_norm(library: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., H] normalised over H and scaled by weight [H]; see the contract."""
    if x.dtype not in NUMBERS:
        return reference.rms_norm(x, weight, epsilon)
    weight = scales(weight, x)
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library.batchgen_rms_norm(
        *arguments(
            *(rows.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(*rows.shape, rows.stride(0), rows.stride(1), epsilon, x.dtype == torch.bfloat16),
        )
    )
    return out


def add_rms_norm(library: Any, residual: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, H] is added to the residual in place; returns the residual normalised; see the contract."""
    if x.dtype not in NUMBERS:
        return reference.add_rms_norm(residual, x, weight, epsilon)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError("add_rms_norm: the residual must be contiguous, of the shape and dtype of x")
    weight, x = scales(weight, x), x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library.batchgen_add_rms_norm(
        *arguments(
            *(residual.data_ptr(), x.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(*x.shape, x.stride(0), epsilon, x.dtype == torch.bfloat16),
        )
    )
    return out


def scales(weight: Tensor, x: Tensor) -> Tensor:
    """The weight side by side, as the library reads it. Raises ValueError for another shape or dtype."""
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"rms_norm: weight {list(weight.shape)} {weight.dtype} for x {list(x.shape)} {x.dtype}")
    return weight.contiguous()
