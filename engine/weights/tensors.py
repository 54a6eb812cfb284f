"""The values a checkpoint reader hands out: a dense tensor, or packed blocks still as they lie in the file.

Knows how to expand a value into a tensor of the compute dtype; not names, files or layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .blocks import BlockType

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .repack import QuantisedWeight, Stored


class TensorSource(Protocol):
    """One tensor of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, outputs first."""

    @property
    def stored_bits(self) -> float:
        """Bits of the file for each number."""

    def copy_to(self, out: "Tensor") -> None:
        """Writes the values into `out`, of the same shape, converting to its dtype."""

    def dequantise(self, dtype: "torch.dtype") -> "Tensor":
        """The values as a new tensor."""

    def float_rows(self) -> "Iterator[Tensor]":
        """The values of a matrix in float32, a few rows at a time."""

    def quantised(self, *kinds: "type[QuantisedWeight]") -> "Stored | None":
        """The values of a matrix as codes with scales, exactly; None for plain numbers.

        With kinds also None, and nothing done, where the weight would be of none of them.
        """


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor that a checkpoint stores as plain numbers."""

    values: "Tensor"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def stored_bits(self) -> float:
        return 8.0 * self.values.itemsize

    def copy_to(self, out: "Tensor") -> None:
        out.copy_(self.values)

    def dequantise(self, dtype: "torch.dtype") -> "Tensor":
        return self.values.to(dtype)

    def float_rows(self) -> "Iterator[Tensor]":
        from .expand import slices

        return (self.values[rows].float() for rows in slices(*self.values.shape))

    def quantised(self, *kinds: "type[QuantisedWeight]") -> None:
        return None


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor in blocks: `raw` [rows, bytes per row] uint8 as in the file, of block type `kind`.

    Every row (the last dimension of `shape`) is a whole number of blocks; a vector is a single row.
    """

    kind: BlockType
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]

    @property
    def stored_bits(self) -> float:
        return 8 * self.kind.bytes / self.kind.size

    def copy_to(self, out: "Tensor") -> None:
        from .expand import expand_into

        expand_into(self.kind, self.raw, out)

    def dequantise(self, dtype: "torch.dtype") -> "Tensor":
        import torch

        out = torch.empty(self.shape, dtype=dtype)
        self.copy_to(out)
        return out

    def float_rows(self) -> "Iterator[Tensor]":
        import torch

        from .expand import slices

        raws = (self.raw[rows] for rows in slices(*self.shape))
        return (replace(self, shape=(len(raw), self.shape[1]), raw=raw).dequantise(torch.float32) for raw in raws)

    def quantised(self, *kinds: "type[QuantisedWeight]") -> "Stored | None":
        from .repack import repack

        return repack(self.kind, self.raw, *kinds)
