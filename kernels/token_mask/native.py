"""The token mask by the native library. Knows the C interface."""

from typing import Any

from torch import Tensor

from ..native.library import arguments
from .reference import mask as reference_mask


def mask(library: Any, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Writes -inf where a bit is 0; see the contract."""
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        reference_mask(logits, rows, bits)
        return
    rows, bits = rows.contiguous(), bits.contiguous()
    library.batchgen_mask(
        *arguments(
            *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
            *(rows.data_ptr(), len(rows), bits.data_ptr(), bits.shape[1]),
        )
    )
