"""Linear layers and how they come into being: a `WeightFormat` turns checkpoint tensors into a `Linear`.

Knows the layout each linear computes on; not where the tensors came from nor which layer they serve.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from batchgen.kernels import Kernels
from batchgen.kernels.draw import DrawnLinear
from batchgen.kernels.sampling import Filters

from .weights.tensors import TensorSource


class Linear(Protocol):
    """x [T, inputs] -> [T, outputs], in the dtype of x or, where the format says so, in float32."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self, index: Tensor) -> Tensor:
        """The weights of the outputs `index` [T], [T, inputs] in the compute dtype: a tied head as an embedding."""

    def draw(self, x: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        """Of the outputs [T, :vocabulary] as logits: a token [T] of each row and whether it was finite [T].

        `filters` cut nothing; see kernels/draw.
        """


class LinearBuilder(Protocol):
    """A linear that fills up as the tensors of its fused projections stream by."""

    def weight(self, row: int, source: TensorSource) -> None:
        """Puts a projection's weight at output rows `row`.. ."""

    def bias(self, row: int, source: TensorSource) -> None:
        """Puts a projection's bias at outputs `row`.. ."""

    def finish(self) -> Linear: ...


class WeightFormat(Protocol):
    """A way to hold the weights of linears in memory."""

    def builder(self, part: str, outputs: int, inputs: int, has_bias: bool) -> LinearBuilder:
        """`part` is the name in the weight plan: "head", "layers.N.qkv", ..."""

    def rounding(self) -> dict[str, float]:
        """What holding the weights so far has changed: error relative to the weights (RMS), by kind of tensor."""


class DenseLinear:
    """x @ weight.T + bias. weight [outputs, inputs] and bias [outputs] in the compute dtype."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._packed = kernels.pack_dense(weight, bias)
        self._dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._packed)

    def rows(self, index: Tensor) -> Tensor:
        return self._kernels.weight_rows(self._packed, index, self._dtype)

    def draw(self, x: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        head = DrawnLinear(self, self._packed, self._packed.bias, self._dtype, vocabulary)
        return self._kernels.draw(x, head, filters)


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A packed weight and the op of the table that multiplies by it; `bias` [outputs] float32."""

    kernels: Kernels
    op: Callable[[Tensor, Any, Tensor | None, torch.dtype], Tensor]
    packed: Any  # what the table's pack_int8 or pack_int4 made
    bias: Tensor | None
    order: Tensor | None  # the inputs in the order of the weight's columns, where it is another
    dtype: torch.dtype  # of computation
    result: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(self._ordered(x))

    def rows(self, index: Tensor) -> Tensor:
        values = self.kernels.weight_rows(self.packed, index, self.dtype)
        return values if self.order is None else values[:, self.order.argsort()]

    def draw(self, x: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        head = DrawnLinear(self._product, self.packed, self.bias, self.result, vocabulary)
        return self.kernels.draw(self._ordered(x), head, filters)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x[:, self.order]

    def _product(self, x: Tensor) -> Tensor:
        return self.op(x, self.packed, self.bias, self.result)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Linears of one input whose weights do not agree in their layout: their outputs one behind the other."""

    parts: Sequence[Linear]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def rows(self, index: Tensor) -> Tensor:
        raise ValueError("rows of a linear that was not fused")

    def draw(self, x: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        raise ValueError("draws from a linear that was not fused")


class DenseBuilder:
    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._weight = weight
        self._bias = bias

    def weight(self, row: int, source: TensorSource) -> None:
        source.copy_to(self._weight[row : row + source.shape[0]])

    def bias(self, row: int, source: TensorSource) -> None:
        if self._bias is None:
            raise ValueError("this linear was built without a bias")
        source.copy_to(self._bias[row : row + source.shape[0]])

    def finish(self) -> DenseLinear:
        return DenseLinear(self._kernels, self._weight, self._bias)


class DenseFormat:
    """Every weight expanded to the compute dtype."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def builder(self, part: str, outputs: int, inputs: int, has_bias: bool) -> DenseBuilder:
        weight = torch.empty((outputs, inputs), dtype=self._dtype, device=self._device)
        bias = torch.empty(outputs, dtype=self._dtype, device=self._device) if has_bias else None
        return DenseBuilder(self._kernels, weight, bias)

    def rounding(self) -> dict[str, float]:
        return {}
