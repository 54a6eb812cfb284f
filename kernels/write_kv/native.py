"""The KV write by the native library. Knows strides and the C interface."""

from typing import Any

import torch
from torch import Tensor

from ..kv_format import LayerPages
from ..native.library import NUMBERS, arguments
from . import reference


def write_kv(library: Any, key: Tensor, value: Tensor, slots: Tensor, pages: LayerPages) -> None:
    """Stores key and value [T, K, D] in their slots of the pages; see the contract."""
    key_pages, value_pages = pages.keys.codes, pages.values.codes
    if not {key.dtype, key_pages.dtype, value_pages.dtype} <= NUMBERS:
        reference.write_kv(key, value, slots, pages)
        return
    for source, stored in ((key, key_pages), (value, value_pages)):
        rows = source if source.stride(2) == 1 else source.contiguous()
        library.batchgen_write_kv(
            *arguments(
                *(rows.data_ptr(), slots.data_ptr(), stored.data_ptr(), *rows.shape),
                *(rows.stride(0), rows.stride(1), stored.stride(0)),
                *(rows.dtype == torch.bfloat16, stored.dtype == torch.bfloat16),
            )
        )
