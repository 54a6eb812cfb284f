"""The KV write by the native library. Knows strides and the C interface."""

from typing import Any

import torch
from torch import Tensor

from ..kv_format import MAX_NATIVE_HEAD_DIM, NATIVE, LayerPages, Pages
from ..native.library import NUMBERS, arguments
from . import reference


def write_kv(library: Any, key: Tensor, value: Tensor, slots: Tensor, pages: LayerPages) -> None:
    """Stores key and value [T, K, D] in their slots of the pages; see the contract."""
    known = key.dtype in NUMBERS and {pages.keys.format.name, pages.values.format.name} <= NATIVE
    if not known or key.shape[2] > MAX_NATIVE_HEAD_DIM:
        reference.write_kv(key, value, slots, pages)
        return
    _write(library, key, slots, pages.keys, pages.keys.format.turned)
    _write(library, value, slots, pages.values, False)


def _write(library: Any, source: Tensor, slots: Tensor, pages: Pages, turned: bool) -> None:
    rows = source if source.stride(2) == 1 else source.contiguous()
    num_slots = pages.codes.shape[1] * pages.codes.shape[2]
    library.batchgen_write_kv(
        *arguments(
            *(rows.data_ptr(), slots.data_ptr(), pages.codes.data_ptr(), pages.scales.data_ptr()),
            *(pages.format.number, pages.row_bytes, pages.scales.shape[3], num_slots),
            *(*rows.shape, rows.stride(0), rows.stride(1), rows.dtype == torch.bfloat16, turned),
        )
    )
