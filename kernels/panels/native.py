"""Quantised linears by the native library: lays a weight out in panels once and passes addresses.

A panel holds 16 outputs: for every four inputs 64 bytes, four of each output; with 4-bit codes 64 bytes hold eight
inputs, the first four in the low halves. Codes are stored as 0 .. 255, their zero beside them. Knows tensors and the C
interface, not the arithmetic.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..linear_int4 import Int4Weight, unpacked
from ..linear_int8 import Int8Weight
from ..native.memory import LargePages
from ..native.tape import empty, run
from . import OUTPUTS, segment_of
from .reference import dequantise, turned_back

INT8_ZERO, INT4_ZERO = 128, 8
NUMBERS = {torch.float32, torch.bfloat16}  # of inputs and outputs in the library; others pass through float32
VALUES_PER_SLICE = (1 << 15) - 1  # fewer than torch would spread over its threads


class _Weight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "minimum", "balance")),
        *((name, ctypes.c_int64) for name in ("inputs", "groups", "group", "segment")),
        *((name, ctypes.c_int64) for name in ("bits", "halves", "zero", "turned")),
    )


class Call(ctypes.Structure):
    """A batch and where its products go; the fields stand in the same order in frame.h."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "outputs", "x_bfloat16", "out_bfloat16")),
    )


class RowsCall(ctypes.Structure):
    """Rows of a weight; the fields stand in the same order in frame.h."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "index", "out")),
        ("out_bfloat16", ctypes.c_int64),
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
    turned: bool
    balance: Tensor | None
    address: _Weight

    def values(self, rows: Tensor) -> Tensor:
        """[R, H] float32: the given rows of the weight, as `Int8Weight.values`."""
        panel, lane = rows // OUTPUTS, rows % OUTPUTS
        codes = self.codes[panel, :, lane]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2)
        whole = codes.flatten(1)[:, : self.shape[1]].to(torch.int16) - self.zero
        minimum = None if self.minimum is None else self.minimum[panel, :, lane]
        values = dequantise(whole, self.scale[panel, :, lane], minimum, self.group)
        return turned_back(values, self.balance) if self.turned else values

    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.minimum, self.balance) if part is not None)


def pack_int8(weight: Int8Weight, memory: LargePages) -> Panels:
    """The weight in panels. Raises ValueError for a group size that is not supported."""
    outputs, inputs = weight.shape
    codes = memory.empty((num_panels(outputs), -(-inputs // 4), OUTPUTS, 4), torch.uint8)
    by_slice(codes, inputs, lambda rows: _quads(weight.q[rows].view(torch.uint8) ^ INT8_ZERO))
    return _panels(codes, weight.minimum, weight, memory, 8, INT8_ZERO)


def pack_int4(weight: Int4Weight, memory: LargePages) -> Panels:
    """The weight in panels; a minimum that is -8 times the scale everywhere becomes a zero of 8."""
    outputs, inputs = weight.shape
    codes = memory.empty((num_panels(outputs), -(-inputs // 8), OUTPUTS, 4), torch.uint8)
    by_slice(codes, inputs, lambda rows: _pairs(_quads(unpacked(weight.q[rows]))))
    if torch.equal(weight.minimum.float(), weight.scale.float() * -INT4_ZERO):
        return _panels(codes, None, weight, memory, 4, INT4_ZERO)
    return _panels(codes, weight.minimum, weight, memory, 4, 0)


def linear(library: Any, x: Tensor, panels: Panels, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight transposed, plus bias float32, as [T, O] in `dtype`; see the contracts."""
    return multiply(library.batchgen_panels, x, panels, bias, dtype)


def multiply(entry: Any, x: Tensor, panels: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product by an entry of the library; `panels` has the weight's `shape` and the `address` it is known by."""
    outputs, inputs = panels.shape
    rows, width = x.size(0), x.size(1)  # of what a tensor tells, this takes the least time
    if width != inputs:
        raise ValueError(f"quantised linear: x has {width} inputs, the weight {inputs}")
    if x.dtype not in NUMBERS or dtype not in NUMBERS:
        return multiply(entry, x.float(), panels, bias, torch.float32).to(dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = empty((rows, outputs), dtype)
    if rows:
        run(entry, laid_out(x, panels, bias, outputs, out.data_ptr(), dtype))
    return out


def laid_out(x: Tensor, panels: Any, bias: Tensor | None, outputs: int, out: int | None, dtype: torch.dtype) -> Call:
    """The call for a batch of rows that lie each in one piece, both dtypes among `NUMBERS`."""
    return Call(
        *(x.size(0), ctypes.addressof(panels.address)),
        *(x.data_ptr(), None if bias is None else bias.data_ptr(), out),
        *(x.stride(0), outputs, x.dtype == torch.bfloat16, dtype == torch.bfloat16),
    )


def expand_rows(entry: Any, panels: Any, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [T] of a weight as numbers [T, H] by an entry of the library."""
    if dtype not in NUMBERS:
        return expand_rows(entry, panels, index, torch.float32).to(dtype)
    index = index.contiguous()
    out = empty((len(index), panels.shape[1]), dtype)
    address = ctypes.addressof(panels.address)
    run(entry, RowsCall(len(index), address, index.data_ptr(), out.data_ptr(), dtype == torch.bfloat16))
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


def paired(numbers: Tensor) -> Tensor:
    """[O, H] -> [panels, pairs, 16, 2]; what is missing is zero."""
    outputs, inputs = numbers.shape
    filled = functional.pad(numbers, (0, inputs % 2, 0, -outputs % OUTPUTS))
    return filled.view(-1, OUTPUTS, filled.shape[1] // 2, 2).transpose(1, 2).contiguous()


def num_panels(outputs: int) -> int:
    return -(-outputs // OUTPUTS)


def by_slice(panels: Tensor, inputs: int, lay_out: Callable[[slice], Tensor]) -> None:
    """Fills panels with what the rows of a weight are laid out as, a few at a time so that the scratch stays small."""
    step = max(1, VALUES_PER_SLICE // (OUTPUTS * inputs))
    for panel in range(0, len(panels), step):
        panels[panel : panel + step] = lay_out(slice(panel * OUTPUTS, (panel + step) * OUTPUTS))


def by_panel(values: Tensor, memory: LargePages) -> Tensor:
    """[O, groups] -> [panels, groups, 16]."""
    filled = functional.pad(values, (0, 0, 0, -len(values) % OUTPUTS))
    return memory.copy(filled.view(-1, OUTPUTS, values.shape[1]).transpose(1, 2))


def _widened(scale: Tensor, minimum: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as they are, or as float32 where a number is not finite: the library reads finite float16 alone."""
    if all(bool(part.isfinite().all()) for part in (scale, minimum) if part is not None):
        return scale, minimum
    return scale.float(), None if minimum is None else minimum.float()


def _panels(
    codes: Tensor, minimum: Tensor | None, weight: Int8Weight | Int4Weight, memory: LargePages, bits: int, zero: int
) -> Panels:
    inputs = weight.shape[1]
    group, turned = min(weight.group, inputs), isinstance(weight, Int8Weight) and weight.turned
    balance = memory.copy(weight.balance) if isinstance(weight, Int8Weight) and weight.balance is not None else None
    scale, minimum = (None if part is None else by_panel(part, memory) for part in _widened(weight.scale, minimum))
    assert scale is not None
    address = _Weight(
        *(codes.data_ptr(), scale.data_ptr()),
        *(None if part is None else part.data_ptr() for part in (minimum, balance)),
        *(inputs, scale.shape[1], group, segment_of(group, inputs, turned)),
        *(bits, scale.dtype == torch.float16, zero, turned),
    )
    return Panels(codes, scale, minimum, weight.shape, group, bits, zero, turned, balance, address)
