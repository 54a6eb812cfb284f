"""Checkpoints that store linears as packed whole numbers beside their scales: GPTQ, AWQ and compressed-tensors.

Knows how each packs its words (models.md §7) and gives every module's pieces out as one weight; the values equal the
format's definition bit for bit in float32.
"""

import logging
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels.linear_int4 import Int4Weight, packed
from batchgen.kernels.linear_int8 import Int8Weight

from ..spec import ModelError
from .repack import QuantisedWeight, Stored, in_half
from .schemes import Scheme
from .tensors import TensorSource

log = logging.getLogger(__name__)

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output 8c + _AWQ_ORDER[i]
Pieces = Mapping[str, Tensor]


class TensorReader(Protocol):
    """The tensors of a checkpoint as they are stored, in any order."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]: ...

    def tensor(self, name: str) -> Tensor: ...

    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight in whole numbers. `stored.order`: the inputs in the order of its columns."""

    stored: Stored
    stored_bits: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.weight.shape

    def copy_to(self, out: Tensor) -> None:
        out.copy_(self.dequantise(torch.float32))

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        values = self.stored.weight.values()
        if self.stored.order is not None:
            values = values[:, self.stored.order.argsort()]
        return values.to(dtype)

    def quantised(self) -> Stored:
        return self.stored


class PackedReader:
    """Another reader's tensors, the pieces of a packed module as its `weight`; modules left plain pass through."""

    def __init__(self, reader: TensorReader, scheme: Scheme) -> None:
        self._reader = reader
        self._scheme = scheme
        self._layout = _LAYOUTS[scheme.method]
        self._stored = reader.shapes()
        ending = f".{self._layout.codes}"
        scaled = f".{self._layout.scale}"
        self._modules = [
            name.removesuffix(ending)
            for name in self._stored
            if name.endswith(ending) and name.removesuffix(ending) + scaled in self._stored
        ]

        if not self._modules:
            raise ModelError(
                f"config says the weights are {scheme.method!r}, yet no tensor is packed; drop quantization_config"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        pieces = {f"{module}.{piece}" for module in self._modules for piece in self._layout.pieces}
        plain = {name: shape for name, shape in self._stored.items() if name not in pieces}
        packed_shapes = {
            f"{module}.weight": self._layout.shape(self._stored[f"{module}.{self._layout.codes}"], self._scheme)
            for module in self._modules
        }
        return {**plain, **packed_shapes}

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]:
        weights = {f"{module}.weight": module for module in self._modules}
        plain = {name for name in self._stored if name in wanted and name not in weights}
        yield from self._reader.tensors(plain)
        for name, module in weights.items():
            if name in wanted:
                yield name, StoredTensor(self._weight(module), self._scheme.bits)

    def digest(self) -> str:
        return self._reader.digest()

    def _weight(self, module: str) -> Stored:
        names = [piece for piece in self._layout.pieces if f"{module}.{piece}" in self._stored]
        try:
            pieces = {piece: self._reader.tensor(f"{module}.{piece}") for piece in names}
            return self._layout.unpack(pieces, self._scheme)
        except (KeyError, ValueError, RuntimeError) as error:
            raise ModelError(f"{module}: its packed weight cannot be read ({error})") from None


@dataclass(frozen=True, slots=True)
class _Layout:
    """The pieces of a module: names, which of them has the codes and the scales, and what they amount to."""

    codes: str
    scale: str
    pieces: tuple[str, ...]
    shape: Callable[[tuple[int, ...], Scheme], tuple[int, int]]  # of the codes -> (outputs, inputs)
    unpack: Callable[[Pieces, Scheme], Stored]


def _gptq(pieces: Pieces, scheme: Scheme) -> Stored:
    codes = _along_first(pieces["qweight"], scheme.bits).T  # [N, K]
    zeros = _along_last(pieces["qzeros"], scheme.bits).T  # [N, groups]
    if scheme.method == "gptq":
        limit = 2**scheme.bits - 1
        if bool((zeros == limit).any()):
            log.warning("a zero point is stored as %d, which is read as 0 here and as %d elsewhere", limit, limit + 1)
        zeros = (zeros + 1) & limit
    return _grouped(codes, pieces["scales"].T, zeros, scheme, pieces.get("g_idx"))


def _awq(pieces: Pieces, scheme: Scheme) -> Stored:
    codes, zeros = (_along_last(pieces[name], 4)[:, _awq_columns(pieces[name])] for name in ("qweight", "qzeros"))
    return _grouped(codes.T, pieces["scales"].T, zeros.T, scheme, None)


def _awq_columns(words: Tensor) -> Tensor:
    """Where outputs 0, 1, 2, ... stand among the nibbles."""
    inverse = torch.tensor(_AWQ_ORDER).argsort()
    return (torch.arange(words.shape[1]).unsqueeze(1) * 8 + inverse).flatten()


def _pack_quantized(pieces: Pieces, scheme: Scheme) -> Stored:
    codes, scale = _along_last(pieces["weight_packed"], 4), pieces["weight_scale"]
    if "weight_shape" in pieces and pieces["weight_shape"].tolist() != list(codes.shape):
        raise ValueError(f"weight_shape says {pieces['weight_shape'].tolist()}, the codes {list(codes.shape)}")
    if scheme.symmetric:
        zeros = torch.full(scale.shape, 8)
    else:
        zeros = _along_first(pieces["weight_zero_point"], 4)[: len(codes)]
    return _grouped(codes, scale, zeros, scheme, pieces.get("weight_g_idx"))


def _int_quantized(pieces: Pieces, scheme: Scheme) -> Stored:
    codes, scale = pieces["weight"], pieces["weight_scale"].float().reshape(-1, 1)
    if codes.dtype != torch.int8 or len(scale) not in (1, len(codes)):
        raise ValueError(f"weight is {codes.dtype}, with {len(scale)} scales for {len(codes)} outputs")
    return Stored(Int8Weight(codes.contiguous(), scale.expand(len(codes), 1).contiguous(), None, codes.shape[1]))


def _along_first(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> [A * 32 / bits, B]: the numbers of a word lie one below the other."""
    return _numbers(words, bits).movedim(-1, 1).reshape(-1, words.shape[1])


def _along_last(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> [A, B * 32 / bits]: the numbers of a word lie side by side."""
    return _numbers(words, bits).flatten(1)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> [A, B, 32 / bits], lowest bits first."""
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}, not int32")
    shifted: Tensor = words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = shifted & (2**bits - 1)
    return numbers


def _grouped(codes: Tensor, scale: Tensor, zeros: Tensor, scheme: Scheme, index: Tensor | None) -> Stored:
    """codes [N, K], scale and zeros [N, groups]: value = scale * (code - zero), groups by `index` [K] where given."""
    inputs = codes.shape[1]
    group = inputs if scheme.group == -1 else scheme.group
    if scale.shape != (len(codes), -(-inputs // group)) or zeros.shape != scale.shape:
        raise ValueError(
            f"scales {list(scale.shape)} and zero points {list(zeros.shape)} for {list(codes.shape)}, group {group}"
        )
    order = None if index is None else _order(index, group)
    if order is not None:
        codes = codes[:, order]
    scale = scale.float().contiguous()
    if scheme.bits == 4:
        return Stored(_int4(codes, scale, zeros, group), order)
    short, minimum = in_half(scale, scale * (128 - zeros))
    return Stored(Int8Weight((codes - 128).to(torch.int8).contiguous(), short, minimum, group), order)


def _int4(codes: Tensor, scale: Tensor, zeros: Tensor, group: int) -> QuantisedWeight:
    if codes.shape[1] % 2:
        raise ValueError(f"{codes.shape[1]} inputs, an odd number")
    short, minimum = in_half(scale, -scale * zeros)
    assert minimum is not None
    return Int4Weight(packed(codes).contiguous(), short, minimum, group)


def _order(index: Tensor, group: int) -> Tensor | None:
    """The inputs sorted by group; None where they already are. Raises ValueError for groups of other sizes."""
    expected = torch.arange(len(index)) // group
    order = index.long().argsort(stable=True)
    if not torch.equal(index.long()[order], expected):
        raise ValueError(f"g_idx does not put {group} inputs into every group")
    return None if torch.equal(index.long(), expected) else order


def _first_packed(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, int]:
    return shape[1], shape[0] * 32 // scheme.bits


_LAYOUTS = {
    "gptq": _Layout("qweight", "scales", ("qweight", "qzeros", "scales", "g_idx"), _first_packed, _gptq),
    "awq": _Layout(
        "qweight", "scales", ("qweight", "qzeros", "scales"), lambda shape, scheme: (shape[1] * 8, shape[0]), _awq
    ),
    "pack-quantized": _Layout(
        "weight_packed",
        "weight_scale",
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        lambda shape, scheme: (shape[0], shape[1] * 8),
        _pack_quantized,
    ),
    "int-quantized": _Layout(
        "weight", "weight_scale", ("weight", "weight_scale"), lambda shape, scheme: (shape[0], shape[1]), _int_quantized
    ),
}
_LAYOUTS["gptq_v2"] = _LAYOUTS["gptq"]
