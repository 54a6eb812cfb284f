"""The 8-bit float linear by the native library: lays a weight out in panels once and passes addresses.

A panel holds 16 outputs: for every two inputs 32 bytes, two of each output. Knows tensors and the C interface, not the
arithmetic.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..native.library import NUMBERS
from ..panels.reference import dequantise
from . import Fp8Weight, check_group

OUTPUTS = 16  # of a panel
VALUES_PER_SLICE = (1 << 15) - 1  # fewer than torch would spread over its threads


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "groups", "group")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "x_stride", "out_stride", "x_bfloat16", "out_bfloat16")),
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


def pack_fp8(weight: Fp8Weight) -> Fp8Panels:
    """The weight in panels. Raises ValueError for a group size that is not supported."""
    outputs, inputs = weight.shape
    group = min(weight.group, inputs)
    check_group(group, inputs)
    raw = weight.q.view(torch.uint8)
    step = max(1, VALUES_PER_SLICE // (OUTPUTS * inputs)) * OUTPUTS
    codes = torch.cat([_pairs(raw[start : start + step]) for start in range(0, outputs, step)])
    filled = functional.pad(weight.scale.float(), (0, 0, 0, -outputs % OUTPUTS))
    scale = filled.view(-1, OUTPUTS, filled.shape[1]).transpose(1, 2).contiguous()
    address = _Weight(codes.data_ptr(), scale.data_ptr(), outputs, inputs, filled.shape[1], group)
    return Fp8Panels(codes, scale, weight.shape, group, address)


def _pairs(codes: Tensor) -> Tensor:
    """[O, H] uint8 -> [panels, pairs, 16, 2]; what is missing is zero."""
    outputs, inputs = codes.shape
    filled = functional.pad(codes, (0, inputs % 2, 0, -outputs % OUTPUTS))
    return filled.view(-1, OUTPUTS, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()


def linear(library: Any, x: Tensor, panels: Fp8Panels, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight transposed, plus bias float32, as [T, O] in `dtype`; see the contract."""
    outputs, inputs = panels.shape
    if x.shape[1] != inputs:
        raise ValueError(f"fp8 linear: x has {x.shape[1]} inputs, the weight {inputs}")
    if not {x.dtype, dtype} <= NUMBERS:
        return linear(library, x.float(), panels, bias, torch.float32).to(dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((len(x), outputs), dtype=dtype)
    if len(x):
        call = _Call(
            *(x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
            *(len(x), x.stride(0), outputs, x.dtype == torch.bfloat16, dtype == torch.bfloat16),
        )
        library.batchgen_linear_fp8(ctypes.byref(panels.address), ctypes.byref(call))
    return out
