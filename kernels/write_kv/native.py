"""The KV write by the native library. Knows strides and the C interface."""

from typing import Any

import torch
from torch import Tensor

from ..native.library import NUMBERS, arguments
from . import reference


def write_kv(library: Any, key: Tensor, value: Tensor, slots: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """Copies key and value [T, K, D] to their slots of the pages [K, N, B, D]; see the contract."""
    if not {key.dtype, key_pages.dtype} <= NUMBERS:
        reference.write_kv(key, value, slots, key_pages, value_pages)
        return
    for source, pages in ((key, key_pages), (value, value_pages)):
        rows = source if source.stride(2) == 1 else source.contiguous()
        library.batchgen_write_kv(
            *arguments(
                *(rows.data_ptr(), slots.data_ptr(), pages.data_ptr(), *rows.shape),
                *(rows.stride(0), rows.stride(1), pages.stride(0)),
                *(rows.dtype == torch.bfloat16, pages.dtype == torch.bfloat16),
            )
        )
