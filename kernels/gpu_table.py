"""The op table of CUDA devices: Triton kernels and the vendor's library. Knows which implementation an op has.

Importing it loads Triton, so nothing that runs on a CPU imports it.
"""

from torch import Tensor

from .rms_norm import gpu as gpu_rms_norm
from .swiglu import gpu as gpu_swiglu
from .tables import ReferenceKernels
from .token_mask import gpu as gpu_token_mask


class GpuKernels(ReferenceKernels):
    """Ops by Triton; those that are best left to torch are the reference's."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return gpu_rms_norm.rms_norm(x, weight, epsilon)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return gpu_swiglu.swiglu(gate_up)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        gpu_token_mask.mask(logits, rows, bits)
