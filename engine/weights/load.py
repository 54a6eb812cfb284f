"""From a reader's tensors to the parts of a decoder: everything checked by name first, then streamed into place.

Knows that nothing may be missing, unexpected or misshapen; not what the parts compute.
"""

import logging
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..linear import Linear, LinearBuilder, WeightFormat
from ..models.names import Place, WeightPlan
from ..spec import ModelError
from .tensors import TensorSource

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LISTED = 5


class WeightReader(Protocol):
    """One checkpoint format: its tensors under Hugging Face names."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]: ...

    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Target:
    """Where a model's parts live: the format of its linears, and dtype and device of everything else."""

    weights: WeightFormat
    dtype: torch.dtype
    device: torch.device


class Parts:
    """A decoder's linears and vectors while they fill up, then finished."""

    def __init__(self, places: Mapping[str, Place], plan: WeightPlan, target: Target) -> None:
        biased = {place.part for place in places.values() if place.bias}
        used = {place.part for place in places.values()}
        self._builders: dict[str, LinearBuilder] = {
            part: target.weights.builder(part, *shape, part in biased)
            for part, shape in plan.linears.items()
            if part in used
        }
        self._dtype, self._device = target.dtype, target.device
        self._vectors: dict[str, Tensor] = {}

    def put(self, place: Place, source: TensorSource) -> None:
        if place.part not in self._builders:
            self._vectors[place.part] = torch.empty(place.shape, dtype=self._dtype, device=self._device)
            source.copy_to(self._vectors[place.part])
        elif place.bias:
            self._builders[place.part].bias(place.row, source)
        else:
            self._builders[place.part].weight(place.row, source)

    def vector(self, part: str) -> Tensor:
        return self._vectors[part]

    def linear(self, part: str) -> Linear:
        return self._builders.pop(part).finish()


def load_parts(reader: WeightReader, plan: WeightPlan, tied: bool, target: Target) -> tuple[Parts, bool]:
    """All parts of a model, and whether its head is the embedding: then the part "head" alone has both.

    Raises ModelError naming the tensors at fault.
    """
    places = model_places(reader, plan, tied)
    return fill_parts(reader, places, plan, target), HEAD not in places


def model_places(reader: WeightReader, plan: WeightPlan, tied: bool) -> dict[str, Place]:
    """By name the stored tensors of a model; where the head is the embedding, this one has the head's place.

    Raises ModelError naming the tensors at fault.
    """
    places = checked_places(reader, plan, tied)
    if tied and HEAD in places and _head_repeats_embedding(reader):
        del places[HEAD]
    if HEAD not in places:
        places[EMBEDDING] = plan.places[HEAD]
    return places


def fill_parts(reader: WeightReader, places: Mapping[str, Place], plan: WeightPlan, target: Target) -> Parts:
    """The parts that these tensors make up. Raises ModelError naming the tensor at fault."""
    parts = Parts(places, plan, target)
    for name, source in reader.tensors(places):
        try:
            parts.put(places[name], source)
        except ValueError as error:
            raise ModelError(f"{name}: {error}; model.weights: native takes it") from error
    return parts


def checked_places(reader: WeightReader, plan: WeightPlan, tied: bool) -> dict[str, Place]:
    """By name the stored tensors that a model is made of: all of its plan, but for a tied head that is not stored.

    Raises ModelError naming the tensors at fault.
    """
    shapes = reader.shapes()
    places = dict(plan.places)
    if tied and HEAD not in shapes:
        del places[HEAD]
    idle = _zero_biases(reader, shapes, plan)
    _check_names(places, plan, {name: shape for name, shape in shapes.items() if name not in idle})
    return places


def _zero_biases(reader: WeightReader, shapes: Mapping[str, tuple[int, ...]], plan: WeightPlan) -> set[str]:
    """Biases a model has no place for and that are zero: some writers of packed weights add them to every linear."""
    extra = {name for name in shapes if name.endswith("_proj.bias") and name not in plan.places}
    return {name for name, source in reader.tensors(extra) if not source.dequantise(torch.float32).any()}


def _check_names(places: Mapping[str, Place], plan: WeightPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in places if name not in shapes]
    extra = [
        name for name in shapes if name not in places and name not in plan.places and not plan.skip.fullmatch(name)
    ]
    wrong = [
        f"{name} is {list(shapes[name])}, not {list(place.shape)}"
        for name, place in places.items()
        if name in shapes and shapes[name] != place.shape
    ]
    _refuse(missing, "missing from the checkpoint")
    _refuse(extra, "in the checkpoint but not in this model")
    _refuse(wrong, "of the wrong shape")


def _refuse(names: list[str], reason: str) -> None:
    if names:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise ModelError(f"{len(names)} tensors {reason}: {', '.join(names[:_LISTED])}{more}")


def _head_repeats_embedding(reader: WeightReader) -> bool:
    """Whether a tied checkpoint that also stores a head stores the same numbers; if not, both are kept."""
    stored = {name: source.dequantise(torch.float32) for name, source in reader.tensors({EMBEDDING, HEAD})}
    same = torch.equal(stored[EMBEDDING], stored[HEAD])
    if not same:
        log.warning("tie_word_embeddings is set, yet lm_head.weight differs from the embedding: both are used")
    return same
