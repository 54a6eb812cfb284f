"""The gated activation by the native library. Knows strides and the C interface."""

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
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("width", "stride", "is_bfloat16")),
    )


def swiglu(library: Any, gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2F] as [T, F]; see the contract."""
    if gate_up.dtype not in NUMBERS:
        return reference.swiglu(gate_up)
    rows = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    tokens, width = rows.shape[0], rows.shape[1] // 2
    out = empty((tokens, width), rows.dtype)
    is_bfloat16 = rows.dtype == torch.bfloat16
    run(library.batchgen_swiglu, _Call(tokens, rows.data_ptr(), out.data_ptr(), width, rows.stride(0), is_bfloat16))
    return out
