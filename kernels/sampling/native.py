"""From logits to tokens by the native library. Knows the C interface, not the arithmetic."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..native.library import arguments
from . import Filters, Penalties


class _Draws(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "noise_keys", "tokens")
    )


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("rows", "tokens", "answer_counts", "repetition", "presence", "frequency")
    )


def finite(library: Any, logits: Tensor) -> Tensor:
    """[R] bool; see the contract."""
    rows = _rows(logits)
    out = torch.empty(len(rows), dtype=torch.bool)
    library.batchgen_finite(*arguments(rows.data_ptr(), rows.stride(0), rows.shape[1], len(rows), out.data_ptr()))
    return out


def penalise(library: Any, logits: Tensor, penalties: Penalties) -> Tensor:
    """New logits [R, V] with the penalties applied; see the contract."""
    out = logits.clone(memory_format=torch.contiguous_format)
    entries = (penalties.rows, penalties.tokens, penalties.answer_counts)
    by_row = (penalties.repetition, penalties.presence, penalties.frequency)
    parts = [part.contiguous() for part in (*entries, *by_row)]
    counts = _Counts(*(part.data_ptr() for part in parts))
    library.batchgen_penalise(*arguments(out.data_ptr(), out.stride(0), len(parts[0])), ctypes.byref(counts))
    return out


def logprobs(library: Any, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of the tokens [R], the top values [R, top] and their ids [R, top]; see the contract."""
    rows, tokens = _rows(logits), tokens.contiguous()
    own = torch.empty(len(rows))
    values, ids = torch.empty(len(rows), top), torch.empty(len(rows), top, dtype=torch.int64)
    size = (rows.data_ptr(), rows.stride(0), rows.shape[1], len(rows))
    found = (own.data_ptr(), values.data_ptr(), ids.data_ptr())
    library.batchgen_logprobs(*arguments(*size, tokens.data_ptr(), top, *found))
    return own, values, ids


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
