"""Draws from a linear by the native library. Knows the C interface, not the arithmetic."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..panels.native import Call, laid_out
from ..sampling import Filters
from . import DrawnLinear


class _DrawCall(ctypes.Structure):
    """The fields stand in the same order in panels/draws.h."""

    _fields_ = (
        ("product", Call),
        *((name, ctypes.c_void_p) for name in ("temperature", "keys", "drawn", "finite")),
    )


def draw(entry: Any, x: Tensor, head: DrawnLinear, filters: Filters) -> tuple[Tensor, Tensor]:
    """Token ids [R] and whether their rows were finite [R], by the entry for the kind of weight; see the contract.

    Raises ValueError for rows of another width than the weight's, and a vocabulary beyond its outputs.
    """
    outputs, inputs = head.weight.shape
    if x.shape[1] != inputs or head.vocabulary > outputs:
        raise ValueError(f"{head.vocabulary} outputs of rows of {x.shape[1]} by a weight of {outputs} x {inputs}")
    x = x if x.stride(1) == 1 else x.contiguous()
    temperature, keys = filters.temperature.contiguous(), filters.noise_keys.contiguous()
    drawn, finite = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x), dtype=torch.bool)
    product = laid_out(x, head.weight, head.bias, head.vocabulary, None, head.dtype)
    parts = (temperature, keys, drawn, finite)
    entry(ctypes.byref(_DrawCall(product, *(part.data_ptr() for part in parts))))
    return drawn, finite
