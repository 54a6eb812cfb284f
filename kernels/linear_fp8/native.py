"""The 8-bit float linear by the native library: lays a weight out in panels once and passes addresses.

A panel holds 16 outputs: for every two inputs 32 bytes, two of each output. Knows tensors and the C interface, not the
arithmetic.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..native.memory import LargePages
from ..panels import OUTPUTS
from ..panels.native import by_panel, by_slice, multiply, num_panels, paired
from ..panels.reference import dequantise
from . import Fp8Weight, check_group


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale")),
        *((name, ctypes.c_int64) for name in ("inputs", "groups", "group")),
    )


@dataclass(frozen=True, slots=True)
class Fp8Panels:
    """A weight in panels: codes uint8 [panels, pairs, 16, 2], scale float32 [panels, groups, 16]."""

    codes: Tensor
    scale: Tensor
    shape: tuple[int, int]
    group: int
    address: _Weight

    def values(self, rows: Tensor) -> Tensor:
        """[R, H] float32: the given rows of the weight, as `Fp8Weight.values`."""
        panel, lane = rows // OUTPUTS, rows % OUTPUTS
        codes = self.codes[panel, :, lane].flatten(1)[:, : self.shape[1]].contiguous().view(torch.float8_e4m3fn)
        return dequantise(codes, self.scale[panel, :, lane], None, self.group)

    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def pack_fp8(weight: Fp8Weight, memory: LargePages) -> Fp8Panels:
    """The weight in panels. Raises ValueError for a group size that is not supported."""
    outputs, inputs = weight.shape
    group = min(weight.group, inputs)
    check_group(group, inputs)
    raw = weight.q.view(torch.uint8)
    codes = memory.empty((num_panels(outputs), -(-inputs // 2), OUTPUTS, 2), torch.uint8)
    by_slice(codes, inputs, lambda rows: paired(raw[rows]))
    scale = by_panel(weight.scale.float(), memory)
    address = _Weight(codes.data_ptr(), scale.data_ptr(), inputs, scale.shape[1], group)
    return Fp8Panels(codes, scale, weight.shape, group, address)


def linear(library: Any, x: Tensor, panels: Fp8Panels, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight transposed, plus bias float32, as [T, O] in `dtype`; see the contract."""
    return multiply(library.batchgen_linear_fp8, x, panels, bias, dtype)
