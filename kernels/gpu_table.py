"""The op table of CUDA devices: Triton kernels and the vendor's library. Knows which implementation an op has.

Importing it loads Triton, so nothing that runs on a CPU imports it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .attention import AttentionItems, Masking
from .attention import gpu as gpu_attention
from .attention.gpu_choice import Tiles
from .chip import Chip
from .copy_blocks import gpu as gpu_copy_blocks
from .grouped.choice import Choices
from .kv_format import LayerPages
from .linear_fp8 import Fp8Weight
from .linear_fp8 import gpu as gpu_fp8
from .linear_int4 import Int4Weight
from .linear_int4 import gpu as gpu_int4
from .linear_int8 import Int8Weight
from .linear_int8 import gpu as gpu_int8
from .rms_norm import gpu as gpu_rms_norm
from .rotate_write import gpu as gpu_rotate_write
from .rounding import Rounding
from .sampling import Filters, Penalties
from .sampling import gpu as gpu_sampling
from .swiglu import gpu as gpu_swiglu
from .tables import ReferenceKernels
from .token_mask import gpu as gpu_token_mask


class GpuKernels(ReferenceKernels):
    """Ops by Triton; those that are best left to torch are the reference's."""

    def __init__(self, chip: Chip, tuned: Mapping[Any, Any] | None = None) -> None:
        """For a chip, which need not be at hand; `tuned` (see kernels/tuned) goes before what is built in."""
        found = {} if tuned is None else tuned
        self.choices, self.tiles = Choices(chip, found), Tiles(chip, found)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return gpu_rms_norm.rms_norm(x, weight, epsilon)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return gpu_rms_norm.add_rms_norm(residual, x, weight, epsilon)

    def copy_blocks(self, stored: Tensor, pairs: Tensor) -> None:
        gpu_copy_blocks.copy_blocks(stored, pairs)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return gpu_swiglu.swiglu(gate_up)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        gpu_token_mask.mask(logits, rows, bits)

    def finite(self, logits: Tensor) -> Tensor:
        return gpu_sampling.finite(logits)

    def penalise(self, logits: Tensor, penalties: Penalties) -> Tensor:
        return gpu_sampling.penalise(logits, penalties)

    def sample(self, logits: Tensor, filters: Filters) -> Tensor:
        return gpu_sampling.sample(logits, filters)

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        return gpu_sampling.logprobs(logits, tokens, top)

    def rounding(self, weight: Int8Weight | Int4Weight | Fp8Weight) -> Rounding:
        if isinstance(weight, Fp8Weight):
            return gpu_fp8.rounding(weight, self.choices)
        return gpu_int8.rounding(weight) if isinstance(weight, Int8Weight) else gpu_int4.rounding(weight, self.choices)

    def turns(self, inputs: int) -> bool:
        return False

    def pack_int8(self, weight: Int8Weight) -> Any:
        return gpu_int8.pack(weight, self.choices)

    def linear_int8(self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out: Tensor = weight(x, bias, dtype)
        return out

    def pack_int4(self, weight: Int4Weight) -> Any:
        return gpu_int4.pack(weight, self.choices)

    def linear_int4(self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out: Tensor = weight(x, bias, dtype)
        return out

    def pack_fp8(self, weight: Fp8Weight) -> Any:
        return gpu_fp8.pack(weight, self.choices)

    def linear_fp8(self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out: Tensor = weight(x, bias, dtype)
        return out

    def plan_attention(self, items: AttentionItems, block_size: int) -> gpu_attention.GpuPlan:
        return gpu_attention.plan_attention(items, block_size, self.tiles)

    def attention(self, query: Tensor, pages: LayerPages, plan: gpu_attention.GpuPlan, masking: Masking) -> Tensor:
        return gpu_attention.attention(query, pages, plan, masking)

    def rotate_write(
        self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: LayerPages
    ) -> Tensor:
        return gpu_rotate_write.rotate_write(query, key, value, cos, sin, slots, pages)
