"""Quantised products that leave activations as they are. Knows which way a batch goes, not how a product is made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import dense, gpu
from .activations import chain_sums
from .choice import wide
from .layout import Laid


@dataclass(frozen=True, slots=True)
class Wide(Laid):
    """A weight of any codes."""

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [T, H] times the weight, plus bias float32, as [T, O] in `dtype`."""
        x = x if x.stride(1) == 1 else x.contiguous()
        choice = wide(self.choices, self.weight, len(x))
        if choice.path == "dense":
            return dense.product(x, self.weight, bias, dtype)
        return gpu.product(self.activations(x), self.weight, bias, dtype, choice)

    def activations(self, x: Tensor) -> gpu.Activations:
        form = self.weight.form
        if self.weight.minimum is None:
            return gpu.Activations(x)
        if not form.grouped:
            return gpu.Activations(x, terms=chain_sums(x, self.shape[1], 1))
        return gpu.Activations(x, terms=chain_sums(x, form.chain * form.width, self.weight.steps * form.scales))


@dataclass(frozen=True, slots=True)
class Loose:
    """A weight whose groups are too short or odd for the product kernel: expanded whole for every batch."""

    weight: Any  # Int4Weight, Int8Weight or Fp8Weight

    @property
    def shape(self) -> tuple[int, int]:
        shape: tuple[int, int] = self.weight.shape
        return shape

    def values(self, rows: Tensor) -> Tensor:
        values: Tensor = self.weight.values(rows)
        return values

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The same product as `Wide`."""
        return dense.multiplied(x, self.weight.values().to(x.dtype), bias, dtype)
