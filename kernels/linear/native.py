"""The dense linear by the native library: lays a bfloat16 weight out in panels once and passes addresses.

A panel holds 16 outputs: for every two inputs 64 bytes, two numbers of each output. Knows tensors and the C interface,
not the arithmetic.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..native.memory import LargePages
from ..panels import OUTPUTS
from ..panels.native import by_slice, multiply, num_panels, paired


class _Weight(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_void_p), ("inputs", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class DensePanels:
    """A weight in panels: numbers bfloat16 [panels, pairs, 16, 2], bias float32 [O] or None."""

    numbers: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    address: _Weight

    def values(self, rows: Tensor) -> Tensor:
        """[R, H] bfloat16: the given rows of the weight."""
        return self.numbers[rows // OUTPUTS, :, rows % OUTPUTS].flatten(1)[:, : self.shape[1]]


def pack_dense(weight: Tensor, bias: Tensor | None, memory: LargePages) -> DensePanels:
    """A bfloat16 weight [O, H] in panels, with its bias [O]."""
    outputs, inputs = weight.shape
    numbers = memory.empty((num_panels(outputs), -(-inputs // 2), OUTPUTS, 2), torch.bfloat16)
    by_slice(numbers, inputs, lambda rows: paired(weight[rows]))
    address = _Weight(numbers.data_ptr(), inputs)
    return DensePanels(numbers, None if bias is None else bias.float(), (outputs, inputs), address)


def linear(library: Any, x: Tensor, panels: DensePanels) -> Tensor:
    """bfloat16 x [T, H] times the weight transposed, plus its bias, as [T, O]; see the contract."""
    return multiply(library.batchgen_linear, x, panels, panels.bias, x.dtype)
