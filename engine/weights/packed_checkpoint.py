"""Checkpoints that store linears packed beside their scales: every module's pieces are given out as one weight.

Knows which tensors belong together, and which carry nothing here; how a format packs its numbers is in `layouts.py`.
"""

import logging
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..spec import ModelError
from .expand import slices
from .layouts import LAYOUTS
from .repack import QuantisedWeight, Stored
from .schemes import PLAIN, Scheme
from .tensors import TensorSource

log = logging.getLogger(__name__)

# What a narrow KV cache would be scaled by, in the spellings there are.
_KV_SCALES = re.compile(
    r".*\.self_attn\.(?:(?:attn\.)?(?:[qkv]|kv|prob)_(?:scale|zero_point)|[kv]_proj\.(?:output|[kv])_(?:scale|zero_point))"
)


class TensorReader(Protocol):
    """The tensors of a checkpoint as they are stored, in any order."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]: ...

    def tensor(self, name: str) -> Tensor: ...

    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight in few bits. `stored.order`: the inputs in the order of its columns."""

    stored: Stored
    stored_bits: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.weight.shape

    def copy_to(self, out: Tensor) -> None:
        for rows, values in zip(slices(*self.shape), self.float_rows(), strict=True):
            out[rows] = values

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype)
        self.copy_to(out)
        return out

    def float_rows(self) -> Iterator[Tensor]:
        weight, order = self.stored.weight, self.stored.order
        columns = slice(None) if order is None else order.argsort()
        numbered = torch.arange(self.shape[0])
        return (weight.values(numbered[rows])[:, columns] for rows in slices(*self.shape))

    def quantised(self, *kinds: type[QuantisedWeight]) -> Stored | None:
        return self.stored if not kinds or isinstance(self.stored.weight, kinds) else None


class WithoutKVScales:
    """Another reader's tensors but for the scales of a KV cache: here each token and head has its own."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._unused = {name for name in reader.shapes() if _KV_SCALES.fullmatch(name)}
        if self._unused:
            log.info("%d KV scales of the checkpoint not used: a narrow KV cache scales each token", len(self._unused))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._reader.shapes().items() if name not in self._unused}

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]:
        return self._reader.tensors(wanted)

    def tensor(self, name: str) -> Tensor:
        return self._reader.tensor(name)

    def digest(self) -> str:
        return self._reader.digest()


class PackedReader:
    """Another reader's tensors, the pieces of a packed module as its `weight`; modules left plain pass through."""

    def __init__(self, reader: TensorReader, scheme: Scheme) -> None:
        self._reader = reader
        self._scheme = scheme
        self._layout = LAYOUTS[scheme.method]
        self._stored = reader.shapes()
        ending = f".{self._layout.codes}"
        named = (name.removesuffix(ending) for name in self._stored if name.endswith(ending))
        self._modules = [module for module in named if self._layout.scale_of(module, self._stored)]
        if not self._modules:
            raise ModelError(
                f"config says the weights are {scheme.method!r}, yet no tensor is packed; drop quantization_config"
            )
        if self._named(self._layout.unused):
            log.info("scales of activations not used: here they are rounded as they come, or not at all")
        self._told = False
        self._pieces = self._named(self._layout.pieces) | self._named(self._layout.unused)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {name: shape for name, shape in self._stored.items() if name not in self._pieces}
        return {**plain, **{f"{module}.weight": self._shape(module) for module in self._modules}}

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]:
        weights = {f"{module}.weight": module for module in self._modules}
        plain = {name for name in self._stored if name in wanted and name not in weights}
        yield from self._reader.tensors(plain)
        for name, module in weights.items():
            if name in wanted:
                yield name, StoredTensor(self._weight(module), self._scheme.bits)

    def digest(self) -> str:
        return self._reader.digest()

    def _named(self, pieces: tuple[str, ...]) -> set[str]:
        return {name for module in self._modules for piece in pieces if (name := f"{module}.{piece}") in self._stored}

    def _shape(self, module: str) -> tuple[int, int]:
        """Raises ModelError for codes that are no matrix."""
        name = f"{module}.{self._layout.codes}"
        if len(self._stored[name]) != 2:
            raise ModelError(f"{name} is {list(self._stored[name])}, no matrix")
        return self._layout.shape(self._stored[name], self._scheme)

    def _weight(self, module: str) -> Stored:
        names = [piece for piece in self._layout.pieces if f"{module}.{piece}" in self._stored]
        try:
            pieces = {piece: self._reader.tensor(f"{module}.{piece}") for piece in names}
            stored = self._layout.unpack(pieces, self._scheme)
            if not self._told:
                self._tell(module, self._layout.doubt(pieces, self._scheme))
        except KeyError as missing:
            raise ModelError(f"{module}: its packed weight cannot be read ({missing.args[0]} is missing)") from None
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"{module}: its packed weight cannot be read ({error})") from None
        return stored

    def _tell(self, module: str, doubt: str | None) -> None:
        """Once, however many modules there are."""
        if doubt is not None:
            self._told = True
            log.warning("%s: %s", module, doubt)


def unpacked_reader(reader: TensorReader, scheme: Scheme) -> WithoutKVScales | PackedReader:
    """The reader of a checkpoint with a quantisation scheme."""
    plain = WithoutKVScales(reader)
    return plain if scheme.method == PLAIN else PackedReader(plain, scheme)
