"""Tables of ops that compute quantised linears in plain PyTorch, as yardsticks of the native ones."""

from typing import Any

import torch
from torch.nn import functional

from batchgen import kernels
from batchgen.kernels.tables import ReferenceKernels


class Rounded:
    """The table of this machine with the reference's quantised linears."""

    def __init__(self) -> None:
        self._others, reference = kernels.load("cpu"), ReferenceKernels()
        self.pack_int8, self.pack_int4, self.pack_fp8 = reference.pack_int8, reference.pack_int4, reference.pack_fp8
        self.linear_int8, self.linear_int4 = reference.linear_int8, reference.linear_int4
        self.linear_fp8 = reference.linear_fp8

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


class ExactActivations(Rounded):
    """Dequantise and multiply: what the quantised linears would be without rounding their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_int8 = self.linear_int4 = self.linear_fp8 = self.multiply

    def multiply(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return functional.linear(x.float(), weight.values(), bias).to(dtype)


def relative(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).square().mean().sqrt() / expected.square().mean().sqrt())
