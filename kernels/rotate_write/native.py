"""Rotary encoding and the KV write by the native library. Knows strides and the C interface."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..kv_format import MAX_NATIVE_HEAD_DIM, NATIVE, LayerPages, Pages
from ..native.library import NUMBERS
from ..native.tape import empty, run
from . import reference


class _Heads(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "stride", "head_stride")),
    )


class _Stored(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("format", "row_bytes", "num_scales", "turned")),
    )


class _Call(ctypes.Structure):
    """The fields stand in the same order in cpu.cpp."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        *((name, _Heads) for name in ("query", "key", "value")),
        *((name, _Stored) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "out")),
        *((name, ctypes.c_int64) for name in ("width", "half", "is_bfloat16")),
        *((name, ctypes.c_int64) for name in ("block_size", "head_step", "block_step")),
    )


def rotate_write(
    library: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: LayerPages,
) -> Tensor:
    """Query [T, Q, D] turned; key and value [T, K, D] go to the pages, the keys turned; see the contract."""
    known = query.dtype in NUMBERS and {pages.keys.format.name, pages.values.format.name} <= NATIVE
    if not known or key.shape[2] > MAX_NATIVE_HEAD_DIM:
        return reference.rotate_write(query, key, value, cos, sin, slots, pages)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    out = empty(query.shape, query.dtype)
    call = _Call(
        len(query),
        *(_heads(x) for x in (query, key, value)),
        *(_stored(pages.keys, pages.keys.format.turned), _stored(pages.values, False)),
        *(x.data_ptr() for x in (cos, sin, slots, out)),
        *(query.shape[2], cos.shape[1], query.dtype == torch.bfloat16),
        *(pages.block_size, pages.head_step, pages.block_step),
    )
    run(library.batchgen_rotate_write, call)
    return out


def _heads(x: Tensor) -> _Heads:
    return _Heads(x.data_ptr(), x.shape[1], x.stride(0), x.stride(1))


def _stored(pages: Pages, turned: bool) -> _Stored:
    numbers = (pages.format.number, pages.row_bytes, pages.scales.shape[3], turned)
    return _Stored(pages.codes.data_ptr(), pages.scales.data_ptr(), *numbers)
