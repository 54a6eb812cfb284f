"""Products of 4-bit codes and activations rounded to 8-bit floats, on chips that multiply such floats.

The rule is one for every batch: few tokens and many are rounded alike, so that an answer does not depend on its company
and what the accuracy gate measures is what runs. Knows which way a batch goes, not how a product is made.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..rounding import E4M3
from . import dense, gpu
from .activations import restored, rounded_with_sums
from .choice import mixed
from .layout import Laid


@dataclass(frozen=True, slots=True)
class Mixed(Laid):
    """A weight of 4-bit codes; activations have one scale for each token."""

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [T, H] rounded, times the weight, plus bias float32, as [T, O] in `dtype`."""
        choice = mixed(self.choices, self.weight, len(x))
        if choice.path == "dense":
            return dense.product(restored(x, E4M3, self.shape[1]), self.weight, bias, dtype)
        return gpu.product(self.activations(x), self.weight, bias, dtype, choice)

    def activations(self, x: Tensor) -> gpu.Activations:
        form, steps = self.weight.form, self.weight.steps
        chains = steps * form.scales if form.grouped else 1
        codes, scale, sums = rounded_with_sums(x, form.chain * form.width, chains, steps * form.step)
        return gpu.Activations(codes, scale[0, : len(x)], sums)
