"""How strong the inputs of a model's linears are: factors that 8-bit weights are balanced by when they are rounded.

Knows a dense model of which it holds one layer at a time, and tokens drawn at random; not how weights are rounded.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import Kernels
from ..kernels.attention import AttentionItems
from ..kernels.kv_format import FORMATS
from ..kernels.sampling import Filters
from .batch import Batch
from .kv import KVPages, KVShape
from .models.names import Place, WeightPlan
from .rope import Rope
from .spec import ModelSpec
from .weights.expand import slices
from .weights.load import HEAD, Parts, Target, WeightReader, fill_parts
from .weights.tensors import TensorSource

if TYPE_CHECKING:
    from .decoder import MLP, Attention

SEQUENCES, LENGTH = 4, 64  # of the random tokens; more of them change little
STEPS = 4  # of a factor of two: what factors are rounded to, so that no order of sums decides about a code
LEAST = 1e-6  # of the mean square: weaker inputs and columns count as so strong


def balancing(weight: Tensor, x: Tensor) -> Tensor:
    """[H] float32, around 1: by what to multiply inputs x [T, H] and divide a weight [O, H] before both are rounded.

    Turned and rounded, either has an error spread evenly over its inputs, which the other multiplies: the error of the
    product goes with |weight / f|^2 |x f|^2, by Cauchy and Schwarz least where f^2 goes with |weight| / |x|, column by
    column. Where x is not finite, 1.
    """
    column, given = (strength.clamp_min(float(strength.mean()) * LEAST) for strength in map(_strength, (weight, x)))
    steps = (column / given).log2() * (STEPS / 4)
    steps = (steps - steps.mean()).round()
    return torch.exp2(steps / STEPS).where(steps.isfinite().all(), torch.ones(()))


def _strength(numbers: Tensor) -> Tensor:
    """[N, H] -> [H] float32: the mean square of each column. A few rows at a time: they may be a large vocabulary's."""
    total = numbers.new_zeros(numbers.shape[1], dtype=torch.float32)
    for rows in slices(*numbers.shape):
        total += numbers[rows].float().square().sum(0)
    return total / len(numbers)


@dataclass(frozen=True, slots=True)
class Watched:
    """A linear that notes in `found`, under its part, the factors that its inputs ask for; a builder of itself."""

    part: str
    stored: Tensor
    added: Tensor | None
    found: dict[str, Tensor]

    def weight(self, row: int, source: TensorSource) -> None:
        source.copy_to(self.stored[row : row + source.shape[0]])

    def bias(self, row: int, source: TensorSource) -> None:
        assert self.added is not None
        source.copy_to(self.added[row : row + source.shape[0]])

    def finish(self) -> "Watched":
        return self

    def watch(self, x: Tensor) -> None:
        self.found[self.part] = balancing(self.stored, x)

    def __call__(self, x: Tensor) -> Tensor:
        self.watch(x)
        return functional.linear(x, self.stored, self.added)

    def rows(self, index: Tensor) -> Tensor:
        return self.stored[index]

    def draw(self, x: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        raise ValueError("draws from a linear that is only watched")


@dataclass(frozen=True, slots=True)
class WatchedFormat:
    """Every weight in the compute dtype, as checkpoints have it."""

    dtype: torch.dtype
    device: torch.device
    found: dict[str, Tensor]

    def builder(self, part: str, outputs: int, inputs: int, has_bias: bool) -> Watched:
        stored = torch.empty((outputs, inputs), dtype=self.dtype, device=self.device)
        return Watched(part, stored, stored.new_empty(outputs) if has_bias else None, self.found)

    def rounding(self) -> dict[str, float]:
        return {}


Layer = Callable[[ModelSpec, Parts, Kernels, int], "tuple[Attention, MLP]"]


@dataclass(slots=True)
class Balance:
    """The factors of a checkpoint's linears by part, found when the first of them is asked for."""

    spec: ModelSpec
    reader: WeightReader
    places: Mapping[str, Place]
    plan: WeightPlan
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    layer: Layer
    _found: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, part: str) -> Tensor:
        """[H] float32."""
        if not self._found:
            self._measure()
        return self._found[part]

    @torch.inference_mode()
    def _measure(self) -> None:
        """Feeds random tokens through layer after layer, each read for it and let go."""
        ends = self._parts([part for part in self._all() if not part.startswith("layers.")])
        head, (batch, pages) = ends.linear("head"), self._batch()
        assert isinstance(head, Watched)
        residual = (head.stored if HEAD not in self.places else ends.vector("embedding"))[batch.tokens]
        rotary = Rope(self.spec.rope, self.spec.context_length, self.device, self.kernels).rows(
            batch.positions, batch.rope_choice
        )
        for index in range(self.spec.num_layers):
            parts = self._parts([part for part in self._all() if part.startswith(f"layers.{index}.")])
            attention, mlp = self.layer(self.spec, parts, self.kernels, index)
            attended = attention(attention.norm(residual), batch, rotary, pages.layer(0))
            residual += mlp(mlp.norm.after(residual, attended))
        head.watch(self.kernels.rms_norm(residual, ends.vector("norm"), self.spec.norm_epsilon))

    def _all(self) -> set[str]:
        return {place.part for place in self.places.values()}

    def _parts(self, wanted: Container[str]) -> Parts:
        places = {name: place for name, place in self.places.items() if place.part in wanted}
        target = Target(WatchedFormat(self.dtype, self.device, self._found), self.dtype, self.device)
        return fill_parts(self.reader, places, self.plan, target)

    def _batch(self) -> tuple[Batch, KVPages]:
        """Sequences of random tokens side by side, each in a block of its own."""
        spec, count, seeded = self.spec, SEQUENCES * LENGTH, torch.Generator().manual_seed(0)
        offsets = np.arange(SEQUENCES + 1)
        positions = np.tile(np.arange(LENGTH), SEQUENCES)
        items = AttentionItems(
            start=np.zeros(SEQUENCES, dtype=np.int64),
            length=np.full(SEQUENCES, LENGTH),
            block_offset=offsets,
            blocks=np.arange(SEQUENCES),
            query_offset=offsets * LENGTH,
            queries=np.arange(count),
            positions=positions,
        )
        shape = KVShape(1, spec.num_kv_heads, spec.head_dim, FORMATS[str(self.dtype).removeprefix("torch.")])
        batch = Batch(
            tokens=torch.randint(spec.vocab_size, (count,), generator=seeded).to(self.device),
            positions=torch.from_numpy(positions).to(self.device),
            slots=torch.arange(count, device=self.device),
            rope_choice=torch.zeros(count, dtype=torch.int64, device=self.device),
            attention=self.kernels.plan_attention(items, LENGTH),
            sampled=torch.arange(count, device=self.device),
        )
        return batch, KVPages(shape, SEQUENCES, LENGTH, self.device)
