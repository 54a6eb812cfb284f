"""RMS normalisation by the native library. Knows strides and the C interface."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..native.library import NUMBERS
from ..native.tape import empty, run
from . import reference


class _Call(ctypes.Structure):
    """The fields stand in the same order in cpu.cpp."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("inner", "width", "stride", "inner_stride", "is_bfloat16")),
        ("epsilon", ctypes.c_double),
    )


def rms_norm(library: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., H] normalised over H and scaled by weight [H]; see the contract."""
    if x.dtype not in NUMBERS:
        return reference.rms_norm(x, weight, epsilon)
    weight = scales(weight, x)
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = empty(x.shape, x.dtype)
    tokens, inner, width = rows.shape
    call = _Call(
        *(tokens, rows.data_ptr(), weight.data_ptr(), None, out.data_ptr()),
        *(inner, width, rows.stride(0), rows.stride(1), x.dtype == torch.bfloat16, epsilon),
    )
    run(library.batchgen_rms_norm, call)
    return out


def add_rms_norm(library: Any, residual: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, H] is added to the residual in place; returns the residual normalised; see the contract."""
    if x.dtype not in NUMBERS:
        return reference.add_rms_norm(residual, x, weight, epsilon)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError("add_rms_norm: the residual must be contiguous, of the shape and dtype of x")
    weight, x = scales(weight, x), x if x.stride(-1) == 1 else x.contiguous()
    out = empty(x.shape, x.dtype)
    tokens, width = x.shape
    call = _Call(
        *(tokens, x.data_ptr(), weight.data_ptr(), residual.data_ptr(), out.data_ptr()),
        *(1, width, x.stride(0), 0, x.dtype == torch.bfloat16, epsilon),
    )
    run(library.batchgen_add_rms_norm, call)
    return out


def scales(weight: Tensor, x: Tensor) -> Tensor:
    """The weight side by side, as the library reads it. Raises ValueError for another shape or dtype."""
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"rms_norm: weight {list(weight.shape)} {weight.dtype} for x {list(x.shape)} {x.dtype}")
    return weight.contiguous()
