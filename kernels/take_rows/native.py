"""Rows of a table by the native library. Knows addresses and bytes."""

import ctypes
from typing import Any

from torch import Tensor

from ..native.tape import empty, run


class _Call(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("table", "index", "out")),
        ("row_bytes", ctypes.c_int64),
    )


def take_rows(library: Any, table: Tensor, index: Tensor) -> Tensor:
    """[T, W]; see the contract."""
    table, index = table.contiguous(), index.contiguous()
    width = table.shape[1]
    out = empty((len(index), width), table.dtype)
    call = _Call(len(index), table.data_ptr(), index.data_ptr(), out.data_ptr(), width * table.itemsize)
    run(library.batchgen_take_rows, call)
    return out
