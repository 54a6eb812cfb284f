"""Sampling by the native library: draws and the check for numbers. Knows the C interface, not the arithmetic."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..native.library import arguments
from . import Filters


class _Draws(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "noise_keys", "tokens")
    )


def finite(library: Any, logits: Tensor) -> Tensor:
    """[R] bool; see the contract."""
    rows = _rows(logits)
    out = torch.empty(len(rows), dtype=torch.bool)
    library.batchgen_finite(*arguments(rows.data_ptr(), rows.stride(0), rows.shape[1], len(rows), out.data_ptr()))
    return out


def sample(library: Any, logits: Tensor, filters: Filters) -> Tensor:
    """Token ids [R] int64, one per row; see the contract."""
    logits = _rows(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    fields = (filters.temperature, filters.top_k, filters.top_p, filters.min_p, filters.noise_keys)
    parts = [*(field.contiguous() for field in fields), tokens]
    draws = _Draws(*(part.data_ptr() for part in parts))
    size = arguments(logits.data_ptr(), logits.stride(0), logits.shape[1], len(logits))
    library.batchgen_sample(*size, ctypes.byref(draws))
    return tokens


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
