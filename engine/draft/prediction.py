"""Layers that a checkpoint ships to predict a further token, as a draft model over the target's own states.

Knows what such a layer computes and where the states of all tokens are kept; when drafts are made is not known here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...kernels import Kernels
from ...kernels.sampling import Filters
from ..batch import Batch
from ..checkpoint import Checkpoint, ModelError
from ..decoder import MLP, Attention, Decoder, RMSNorm, build_layer
from ..kv import KVPages, KVShape
from ..linear import DenseFormat, Linear
from ..models import mimo
from ..models.names import WeightPlan
from ..runner import Part, Runner
from ..sequence import Feed
from ..spec import ModelSpec
from ..weights.load import Target, fill_parts

# By `model_type`: the families whose checkpoints have them, in a layout that is documented.
PREDICTION_WEIGHTS: Mapping[str, Callable[[ModelSpec], WeightPlan]] = {"mimo": mimo.prediction_weights}


@dataclass(frozen=True, slots=True)
class PredictionLayer:
    """From a token and the target's state before it to the token after it: both normed, projected, one usual layer."""

    target: Decoder
    token_norm: RMSNorm
    state_norm: RMSNorm
    project: Linear
    attention: Attention
    mlp: MLP
    norm: RMSNorm

    @property
    def shape(self) -> KVShape:
        """What its keys and values take for a token."""
        return replace(self.target.kv_shape(), num_layers=1)

    @property
    def state_bytes(self) -> int:
        """Of the state that is kept for a token."""
        return self.target.spec.hidden_size * self.target.dtype.itemsize

    def forward(self, states: Tensor, batch: Batch, pages: KVPages) -> Tensor:
        """[R, H] of the sampled rows, final-normed; `states` [T, H] stand before its tokens, at any scale."""
        token = self.token_norm(self.target.embedded(batch.tokens))
        residual = self.project(torch.cat([self.state_norm(states), token], dim=-1))
        rotary = self.target.rotary(batch)
        attended = self.attention(self.attention.norm(residual), batch, rotary, pages.layer(0))
        fed = self.mlp(self.mlp.norm.after(residual, attended))
        return self.norm.after(residual, fed)[batch.sampled]


def load_prediction_layer(checkpoint: Checkpoint, target: Decoder, kernels: Kernels) -> PredictionLayer:
    """The first such layer of the checkpoint, in the target's compute dtype. Raises ModelError when there is none."""
    family, spec = target.spec.model_type, target.spec
    if family not in PREDICTION_WEIGHTS or not checkpoint.config.get("num_nextn_predict_layers"):
        known = ", ".join(PREDICTION_WEIGHTS)
        raise ModelError(
            f"the model ships no layer that predicts a further token (families that do: {known}); use auto"
        )
    plan = PREDICTION_WEIGHTS[family](spec)
    missing = [name for name in plan.places if checkpoint.reader.shapes().get(name) != plan.places[name].shape]
    if missing:
        raise ModelError(
            f"tensor {missing[0]} is missing or of another shape than {list(plan.places[missing[0]].shape)}"
        )
    dense = DenseFormat(kernels, target.dtype, target.device)
    parts = fill_parts(checkpoint.reader, plan.places, plan, Target(dense, target.dtype, target.device))
    token, state, last = (
        RMSNorm(kernels, parts.vector(f"{name}_layernorm"), spec.norm_epsilon) for name in ("token", "hidden", "final")
    )
    attention, mlp = build_layer(replace(spec, num_layers=1, windows=(None,)), parts, kernels, 0)
    return PredictionLayer(target, token, state, parts.linear("input"), attention, mlp, last)


class TokenStates:
    """Watches the target's runner: the state behind every token that has keys, in the same slots as these."""

    sees_all = True

    def __init__(self, target: Decoder, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        weight = target.final_norm.weight
        self._inverse = torch.where(weight == 0, weight, 1 / weight)  # layers read states as they are before this norm
        size, kept = target.spec.hidden_size, num_blocks * block_size + 1  # the last: zeros, before a first token
        self._states = torch.zeros((kept, size), dtype=target.dtype, device=target.device)

    def copied(self, pairs: list[tuple[int, int]]) -> None:
        blocks = self._states[:-1].view(-1, self._block_size, self._states.shape[1])
        for source, destination in pairs:
            blocks[destination] = blocks[source]

    def saw(self, feeds: list[Feed], batch: Batch, hidden: Tensor) -> None:
        self.put(batch.slots, hidden * self._inverse)

    def put(self, slots: Tensor, states: Tensor) -> None:
        self._states[slots] = states

    def at(self, slots: Tensor) -> Tensor:
        """[T, H] of the slots [T]."""
        return self._states[slots]

    def slots_before(self, feed: Feed) -> np.ndarray:
        """For every token of the feed the slot of the one before it."""
        places = np.arange(feed.start - 1, feed.start - 1 + feed.count)
        blocks = np.array(feed.sequence.blocks, np.int64)
        slots = blocks[places // self._block_size] * self._block_size + places % self._block_size
        return np.where(places < 0, len(self._states) - 1, slots)


@dataclass(slots=True)
class Prediction:
    """A layer with the states it reads, as a runner's model. Of a token that it drafts its own state stands in."""

    layer: PredictionLayer
    states: TokenStates
    before: Tensor | None = None  # of the feeds to run next

    def rope_choice(self, length: int) -> int:
        return self.layer.target.rope_choice(length)

    def forward(self, batch: Batch, pages: KVPages) -> Tensor:
        assert self.before is not None
        found = self.layer.forward(self.before, batch, pages)
        self.states.put(batch.slots[batch.sampled], found)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return self.layer.target.logits(hidden)

    def draw(self, hidden: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        return self.layer.target.draw(hidden, vocabulary, filters)


class PredictionRunner(Runner):
    """Looks up the states before the tokens of every forward pass."""

    model: Prediction

    def start(self, feeds: list[Feed]) -> Part:
        states = self.model.states
        slots = np.concatenate([states.slots_before(feed) for feed in feeds])
        self.model.before = states.at(self._tensor(slots))
        return Runner.start(self, feeds)
