"""The gated activation by the native library. Knows strides and the C interface."""

from typing import Any

import torch
from torch import Tensor

from ..native.library import NUMBERS, arguments
from . import reference


def swiglu(library: Any, gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2F] as [T, F]; see the contract."""
    if gate_up.dtype not in NUMBERS:
        return reference.swiglu(gate_up)
    rows = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    num_rows, width = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=rows.dtype)
    is_bfloat16 = rows.dtype == torch.bfloat16
    library.batchgen_swiglu(*arguments(rows.data_ptr(), out.data_ptr(), num_rows, width, rows.stride(0), is_bfloat16))
    return out
