"""Rotary encoding by the native library. Knows strides and the C interface."""

from typing import Any

import torch
from torch import Tensor

from ..native.library import NUMBERS, arguments
from . import reference


def rotary(library: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query [T, Q, D] and key [T, K, D] turned by the angles of their tokens; see the contract."""
    if query.dtype not in NUMBERS:
        return reference.rotary(query, key, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _turn(library, query, cos, sin), _turn(library, key, cos, sin)


def _turn(library: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    library.batchgen_rotary(
        *arguments(
            *(tensor.data_ptr() for tensor in (x, cos, sin, out)),
            *(*x.shape, cos.shape[1], x.stride(0), x.stride(1), x.dtype == torch.bfloat16),
        )
    )
    return out
