"""Quantised linears by the native library: lays a weight out in panels once and passes addresses.

A panel holds 16 outputs: for every four inputs 64 bytes, four of each output; with 4-bit codes 64 bytes hold eight
inputs, the first four in the low halves. Codes are stored as 0 .. 255, their zero beside them. Knows tensors and the C
interface, not the arithmetic.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ..linear_int4 import Int4Weight
from ..linear_int8 import Int8Weight
from . import OUTPUTS, segment_of
from .reference import dequantise

INT8_ZERO, INT4_ZERO = 128, 8
NUMBERS = {torch.float32, torch.bfloat16}  # of inputs and outputs in the library; others pass through float32
VALUES_PER_SLICE = (1 << 15) - 1  # fewer than torch would spread over its threads
Weight = TypeVar("Weight", Int8Weight, Int4Weight)


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "minimum")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "groups", "group", "segment")),
        *((name, ctypes.c_int64) for name in ("bits", "halves", "zero")),
    )


class Call(ctypes.Structure):
    """A batch and where its products go; the fields stand in the same order in the .cpp files."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "x_stride", "out_stride", "x_bfloat16", "out_bfloat16")),
    )


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight in panels: codes uint8 [panels, quads or pairs of quads, 16, 4], scale, minimum [panels, groups, 16]."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    shape: tuple[int, int]
    group: int
    bits: int
    zero: int
    address: _Weight

    def values(self, rows: Tensor) -> Tensor:
        """[R, H] float32: the given rows of the weight, as `Int8Weight.values`."""
        panel, lane = rows // OUTPUTS, rows % OUTPUTS
        codes = self.codes[panel, :, lane]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)
        whole = codes.flatten(1)[:, : self.shape[1]].to(torch.int16) - self.zero
        minimum = None if self.minimum is None else self.minimum[panel, :, lane]
        return dequantise(whole, self.scale[panel, :, lane], minimum, self.group)

    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.minimum) if part is not None)


def pack_int8(weight: Int8Weight) -> Panels:
    """The weight in panels. Raises ValueError for a group size that is not supported."""
    codes = _by_slice(weight, lambda part: _quads(part.q.view(torch.uint8) ^ INT8_ZERO))
    return _panels(codes, weight.scale, weight.minimum, weight, 8, INT8_ZERO)


def pack_int4(weight: Int4Weight) -> Panels:
    """The weight in panels; a minimum that is -8 times the scale everywhere becomes a zero of 8."""
    codes = _by_slice(weight, lambda part: _pairs(_quads(part.codes())))
    if torch.equal(weight.minimum.float(), weight.scale.float() * -INT4_ZERO):
        return _panels(codes, weight.scale, None, weight, 4, INT4_ZERO)
    return _panels(codes, weight.scale, weight.minimum, weight, 4, 0)


def linear(library: Any, x: Tensor, panels: Panels, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight transposed, plus bias float32, as [T, O] in `dtype`; see the contracts."""
    return multiply(library.batchgen_panels, x, panels, bias, dtype)


def multiply(entry: Any, x: Tensor, panels: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product by an entry of the library; `panels` has the weight's `shape` and the `address` it is known by."""
    outputs, inputs = panels.shape
    if x.shape[1] != inputs:
        raise ValueError(f"quantised linear: x has {x.shape[1]} inputs, the weight {inputs}")
    if not {x.dtype, dtype} <= NUMBERS:
        return multiply(entry, x.float(), panels, bias, torch.float32).to(dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((len(x), outputs), dtype=dtype)
    if len(x):
        call = Call(
            *(x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
            *(len(x), x.stride(0), outputs, x.dtype == torch.bfloat16, dtype == torch.bfloat16),
        )
        entry(ctypes.byref(panels.address), ctypes.byref(call))
    return out


def _quads(codes: Tensor) -> Tensor:
    """[O, H] uint8 -> [panels, quads, 16, 4]; what is missing is zero."""
    outputs, inputs = codes.shape
    filled = functional.pad(codes, (0, -inputs % 4, 0, -outputs % OUTPUTS))
    return filled.view(-1, OUTPUTS, filled.shape[1] // 4, 4).transpose(1, 2).contiguous()


def _pairs(quads: Tensor) -> Tensor:
    """[panels, quads, 16, 4] of numbers below 16 -> [panels, pairs of quads, 16, 4]."""
    quads = functional.pad(quads, (0, 0, 0, 0, 0, quads.shape[1] % 2))
    return quads[:, ::2] | (quads[:, 1::2] << 4)


def _by_slice(weight: Weight, lay_out: Callable[[Weight], Tensor]) -> Tensor:
    """The codes of all panels, laid out a few panels at a time so that the scratch stays small."""
    outputs, inputs = weight.shape
    step = max(1, VALUES_PER_SLICE // (OUTPUTS * inputs)) * OUTPUTS
    parts = (replace(weight, q=weight.q[start : start + step]) for start in range(0, outputs, step))
    return torch.cat([lay_out(part) for part in parts])


def _by_panel(values: Tensor | None) -> Tensor | None:
    """[O, groups] -> [panels, groups, 16]."""
    if values is None:
        return None
    filled = functional.pad(values, (0, 0, 0, -len(values) % OUTPUTS))
    return filled.view(-1, OUTPUTS, values.shape[1]).transpose(1, 2).contiguous()


def _panels(
    codes: Tensor, scale: Tensor, minimum: Tensor | None, weight: Int8Weight | Int4Weight, bits: int, zero: int
) -> Panels:
    outputs, inputs = weight.shape
    group = min(weight.group, inputs)
    by_panel, minimum = _by_panel(scale), _by_panel(minimum)
    assert by_panel is not None
    address = _Weight(
        *(codes.data_ptr(), by_panel.data_ptr(), None if minimum is None else minimum.data_ptr()),
        *(outputs, inputs, scale.shape[1], group, segment_of(group, inputs)),
        *(bits, scale.dtype == torch.float16, zero),
    )
    return Panels(codes, by_panel, minimum, weight.shape, group, bits, zero, address)
