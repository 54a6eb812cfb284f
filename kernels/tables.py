"""The literal table of op tables by kind of device. Knows which implementation an op has, not how it works."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import Kernels
from .attention import AttentionItems, Masking
from .attention import native as native_attention
from .attention.reference import attention, plan_attention
from .chip import chip_of
from .copy_blocks.reference import copy_blocks
from .draw import DrawnLinear
from .draw import native as native_draw
from .draw.reference import draw
from .kv_format import LayerPages
from .linear import DenseWeight
from .linear import native as native_linear
from .linear.native import DensePanels
from .linear.reference import linear
from .linear_fp8 import Fp8Weight, check_group
from .linear_fp8 import native as native_fp8
from .linear_fp8.native import Fp8Panels
from .linear_fp8.reference import linear_fp8
from .linear_int4 import Int4Weight
from .linear_int4.reference import linear_int4
from .linear_int8 import Int8Weight
from .linear_int8.reference import linear_int8
from .native.library import available, open_library
from .native.memory import LargePages
from .panels import TURNED, can_turn, segment_of
from .panels import native as native_panels
from .panels.native import Panels
from .rms_norm import native as native_rms_norm
from .rms_norm.reference import add_rms_norm, rms_norm
from .rotate_write import native as native_rotate_write
from .rotate_write.reference import rotate_write
from .rounding import BFLOAT16, INT8, Rounding
from .sampling import Filters, Penalties
from .sampling import native as native_sampling
from .sampling.reference import finite, logprobs, penalise, sample
from .swiglu import native as native_swiglu
from .swiglu.reference import swiglu
from .take_rows import native as native_take_rows
from .take_rows.reference import take_rows
from .token_mask import native as native_token_mask
from .token_mask.reference import mask
from .tuned import read_tuned, tuned_file

log = logging.getLogger(__name__)

# By kind of packed weight: the entry of the library that gives rows back.
ROWS = {Panels: "batchgen_panel_rows", DensePanels: "batchgen_dense_rows", Fp8Panels: "batchgen_fp8_rows"}
# And the one that draws from its products.
DRAWS = {Panels: "batchgen_panels_draw", DensePanels: "batchgen_linear_draw", Fp8Panels: "batchgen_fp8_draw"}


class ReferenceKernels:
    """Every op by its PyTorch reference."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return rms_norm(x, weight, epsilon)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return add_rms_norm(residual, x, weight, epsilon)

    def rotate_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: LayerPages
    ) -> Tensor:
        return rotate_write(query, key, value, cos, sin, slots, pages)

    def copy_blocks(self, stored: Tensor, pairs: Tensor) -> None:
        copy_blocks(stored, pairs)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def pack_dense(self, weight: Tensor, bias: Tensor | None) -> Any:
        return DenseWeight(weight, bias)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return linear(x, weight)

    def weight_rows(self, weight: Any, index: Tensor, dtype: torch.dtype) -> Tensor:
        values: Tensor = weight.values(index)
        return values.to(dtype)

    def take_rows(self, table: Tensor, index: Tensor) -> Tensor:
        return take_rows(table, index)

    def rounding(self, weight: Int8Weight | Int4Weight | Fp8Weight) -> Rounding:
        if isinstance(weight, Fp8Weight):
            return Rounding(BFLOAT16)
        turned = isinstance(weight, Int8Weight) and weight.turned
        return Rounding(INT8, segment_of(weight.group, weight.shape[1], turned), TURNED if turned else 1)

    def turns(self, inputs: int) -> bool:
        return can_turn(inputs)

    def pack_int8(self, weight: Int8Weight) -> Any:
        segment_of(weight.group, weight.shape[1], weight.turned)
        return weight

    def linear_int8(self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return linear_int8(x, weight, bias, dtype)

    def pack_int4(self, weight: Int4Weight) -> Any:
        segment_of(weight.group, weight.shape[1])
        return weight

    def linear_int4(self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return linear_int4(x, weight, bias, dtype)

    def pack_fp8(self, weight: Fp8Weight) -> Any:
        check_group(weight.group, weight.shape[1])
        return weight

    def linear_fp8(self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return linear_fp8(x, weight, bias, dtype)

    def plan_attention(self, items: AttentionItems, block_size: int) -> Any:
        return plan_attention(items, block_size)

    def attention(self, query: Tensor, pages: LayerPages, plan: Any, masking: Masking) -> Tensor:
        return attention(query, pages, plan, masking)

    def draw(self, x: Tensor, head: DrawnLinear, filters: Filters) -> tuple[Tensor, Tensor]:
        return draw(self, x, head, filters)

    def finite(self, logits: Tensor) -> Tensor:
        return finite(logits)

    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        return penalise(logits, penalties)

    def sample(self, logits: Tensor, filters: Filters) -> Tensor:
        return sample(logits, filters)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        mask(logits, rows, bits)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        return logprobs(logits, tokens, top)


class NativeKernels(ReferenceKernels):
    """Ops by the native library of an instruction set; those it lacks are the reference's."""

    def __init__(self, instructions: str) -> None:
        """Raises ValueError when this machine has no library for the instructions."""
        self._library = open_library(instructions)
        self._memory = LargePages()

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return native_rms_norm.rms_norm(self._library, x, weight, epsilon)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return native_rms_norm.add_rms_norm(self._library, residual, x, weight, epsilon)

    def rotate_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: LayerPages
    ) -> Tensor:
        return native_rotate_write.rotate_write(self._library, query, key, value, cos, sin, slots, pages)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return native_swiglu.swiglu(self._library, gate_up)

    def draw(self, x: Tensor, head: DrawnLinear, filters: Filters) -> tuple[Tensor, Tensor]:
        if type(head.weight) not in DRAWS or {x.dtype, head.dtype} - native_panels.NUMBERS:
            return super().draw(x, head, filters)
        return native_draw.draw(getattr(self._library, DRAWS[type(head.weight)]), x, head, filters)

    def finite(self, logits: Tensor) -> Tensor:
        return native_sampling.finite(self._library, logits)

    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        return native_sampling.penalise(self._library, logits, penalties)

    def sample(self, logits: Tensor, filters: Filters) -> Tensor:
        return native_sampling.sample(self._library, logits, filters)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        native_token_mask.mask(self._library, logits, rows, bits)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        return native_sampling.logprobs(self._library, logits, tokens, top)

    def plan_attention(self, items: AttentionItems, block_size: int) -> Any:
        return native_attention.plan_attention(items, block_size)

    def attention(self, query: Tensor, pages: LayerPages, plan: Any, masking: Masking) -> Tensor:
        return native_attention.attention(self._library, query, pages, plan, masking)

    def weight_rows(self, weight: Any, index: Tensor, dtype: torch.dtype) -> Tensor:
        if type(weight) not in ROWS:
            return super().weight_rows(weight, index, dtype)
        return native_panels.expand_rows(getattr(self._library, ROWS[type(weight)]), weight, index, dtype)

    def take_rows(self, table: Tensor, index: Tensor) -> Tensor:
        return native_take_rows.take_rows(self._library, table, index)

    def pack_dense(self, weight: Tensor, bias: Tensor | None) -> DensePanels | DenseWeight:
        if weight.dtype == torch.bfloat16:
            return native_linear.pack_dense(weight, bias, self._memory)
        return DenseWeight(weight, bias)  # the vendor's product is the best there is for float32

    def linear(self, x: Tensor, weight: DensePanels | DenseWeight) -> Tensor:
        return linear(x, weight) if isinstance(weight, DenseWeight) else native_linear.linear(self._library, x, weight)

    def pack_int8(self, weight: Int8Weight) -> Panels:
        return native_panels.pack_int8(weight, self._memory)

    def linear_int8(self, x: Tensor, weight: Panels, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return native_panels.linear(self._library, x, weight, bias, dtype)

    def pack_int4(self, weight: Int4Weight) -> Panels:
        return native_panels.pack_int4(weight, self._memory)

    def linear_int4(self, x: Tensor, weight: Panels, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return native_panels.linear(self._library, x, weight, bias, dtype)

    def pack_fp8(self, weight: Fp8Weight) -> Fp8Panels:
        return native_fp8.pack_fp8(weight, self._memory)

    def linear_fp8(self, x: Tensor, weight: Fp8Panels, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return native_fp8.linear(self._library, x, weight, bias, dtype)


@cache
def cpu_kernels() -> Kernels:
    """The native kernels for the best instructions of this processor; the reference when none were built."""
    sets = available()
    if not sets:
        log.warning("native CPU kernels were not built (no C++ compiler at install?): running on the slower reference")
        return ReferenceKernels()
    return NativeKernels(sets[0])


def gpu_kernels(card: int | None) -> Kernels:
    """Those of a card by its number, by default the current one."""
    return kernels_of_card(torch.cuda.current_device() if card is None else card)


@cache
def kernels_of_card(card: int) -> Kernels:
    """The Triton kernels with what was tuned for cards of its name; nothing is tuned here.

    Raises ValueError where Triton is not installed, and for a file of tuned choices that cannot be read.
    """
    try:
        from .gpu_table import GpuKernels
    except ModuleNotFoundError as error:
        raise ValueError(f"device 'cuda' needs Triton: pip install triton ({error})") from error
    # The contract of `linear`: parts of a sum are float32 in the vendor's library too.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return GpuKernels(chip_of(card), read_tuned(tuned_file(), torch.cuda.get_device_name(card)))


# By kind of device, of one with a number or without.
TABLES: dict[str, Callable[[int | None], Kernels]] = {"cpu": lambda number: cpu_kernels(), "cuda": gpu_kernels}
