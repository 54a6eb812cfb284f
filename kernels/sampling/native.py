"""Sampling by the native library: the best token, draws from the whole distribution, the check for numbers.

Knows the C interface. Rows that filters cut are the reference's.
"""

from typing import Any

import torch
from torch import Tensor

from ..native.library import arguments
from . import Filters
from .reference import draw_filtered_rows, filtered_rows


def finite(library: Any, logits: Tensor) -> Tensor:
    """[R] bool; see the contract."""
    rows = _rows(logits)
    out = torch.empty(len(rows), dtype=torch.bool)
    library.batchgen_finite(*arguments(rows.data_ptr(), rows.stride(0), rows.shape[1], len(rows), out.data_ptr()))
    return out


def sample(library: Any, logits: Tensor, filters: Filters) -> Tensor:
    """Token ids [R] int64, one per row; see the contract."""
    logits = _rows(logits)
    out = torch.empty(len(logits), dtype=torch.int64)
    filtered = filtered_rows(filters)
    plain = (~filtered).nonzero().squeeze(1)
    temperature, keys = filters.temperature.contiguous(), filters.noise_keys.contiguous()
    library.batchgen_sample(
        *arguments(
            *(logits.data_ptr(), logits.stride(0), logits.shape[1], plain.data_ptr(), len(plain)),
            *(temperature.data_ptr(), keys.data_ptr(), out.data_ptr()),
        )
    )
    draw_filtered_rows(filtered, logits, filters, out)
    return out


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
