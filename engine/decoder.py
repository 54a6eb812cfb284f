"""The one decoder, built from a `ModelSpec`: token ids and KV pages in, hidden states and logits out.

Knows the order of the maths and nothing of families, file formats, scheduling or sampling. Shapes: T fed tokens,
R sampled rows, H hidden, Q query heads, K key/value heads, D head width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from batchgen.kernels import Kernels
from batchgen.kernels.attention import Masking
from batchgen.kernels.kv_format import FORMATS, LayerPages
from batchgen.kernels.native.memory import give_back
from batchgen.kernels.sampling import Filters

from .balance import Balance
from .batch import Batch
from .checkpoint import Checkpoint
from .kv import KVPages, KVShape
from .linear import Linear
from .models import architecture
from .rope import Rope
from .spec import ModelSpec
from .weights.formats import weight_format
from .weights.load import HEAD, Parts, Target, fill_parts, model_places


@dataclass(frozen=True, slots=True)
class LinearHead:
    """The last linear of a model."""

    linear: Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        return self.linear(hidden).float()

    def draw(self, hidden: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        return self.linear.draw(hidden, vocabulary, filters)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    kernels: Kernels
    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.epsilon)

    def after(self, residual: Tensor, x: Tensor) -> Tensor:
        """The norm of `residual` once x has been added to it, in place."""
        return self.kernels.add_rms_norm(residual, x, self.weight, self.epsilon)


def unchanged(x: Tensor) -> Tensor:
    """The norm of a model without norms on queries and keys."""
    return x


@dataclass(frozen=True, slots=True)
class Attention:
    """q/k/v, rotary and write to the pages, attend, output projection; `norm` makes what it is called with."""

    kernels: Kernels
    spec: ModelSpec
    masking: Masking
    norm: RMSNorm
    qkv: Linear
    query_norm: Callable[[Tensor], Tensor]
    key_norm: Callable[[Tensor], Tensor]
    output: Linear

    def __call__(self, normed: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor], pages: LayerPages) -> Tensor:
        query, key, value = self._heads(self.qkv(normed))
        query, key = self.query_norm(query), self.key_norm(key)
        turned = self.kernels.rotate_write(query, key, value, *rotary, batch.slots, pages)
        attended = self.kernels.attention(turned, pages, batch.attention, self.masking)
        return self.output(attended.reshape(len(normed), self.spec.query_size))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (Q+2K)*D] -> [T, Q, D], [T, K, D], [T, K, D]."""
        spec = self.spec
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        query, key, value = heads.split_with_sizes([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return query, key, value


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated; `norm` makes what it is called with."""

    kernels: Kernels
    norm: RMSNorm
    gate_up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Tensor:
        return self.down(self.kernels.swiglu(self.gate_up(normed)))


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids [T] -> [T, H] of `dtype` on `device`."""

    rows: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    device: torch.device


class Decoder:
    """A model on one device, in one compute dtype. `rounding`: what quantising at load cost, by kind of tensor."""

    def __init__(self, spec: ModelSpec, parts: Parts, head: Linear, kernels: Kernels, embedding: Embedding) -> None:
        self.spec = spec
        self.device, self.dtype = embedding.device, embedding.dtype
        self.rounding: dict[str, float] = {}
        self._kernels = kernels
        self._embedding = embedding
        self._head = LinearHead(head)
        self._rope = Rope(spec.rope, spec.context_length, embedding.device, kernels)
        build = _Builder(spec, parts, kernels)
        self._layers = [(build.attention(index), build.mlp(index)) for index in range(spec.num_layers)]
        self.final_norm = build.norm("norm")

    def kv_shape(self, kv_cache: str = "auto") -> KVShape:
        """What a cached token takes in a KV format (a key of `kv_format.FORMATS`); auto: the compute dtype."""
        spec = self.spec
        kept = str(self.dtype).removeprefix("torch.") if kv_cache == "auto" else kv_cache
        return KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, FORMATS[kept])

    def rope_choice(self, length: int) -> int:
        """Which RoPE table a row of `length` tokens (prompt and max_tokens) uses all its life."""
        return self._rope.choice(length)

    def forward(self, batch: Batch, pages: KVPages) -> Tensor:
        """[R, H]: the final-normed hidden states of `batch.sampled`; keys and values of all T go to the pages."""
        return self.forward_through(len(self._layers), batch, pages)

    def forward_through(self, num_layers: int, batch: Batch, pages: KVPages) -> Tensor:
        """The same behind the first layers only, as if the others were not there."""
        layers = self._layers[:num_layers]
        next_norms = [*(attention.norm for attention, _ in layers[1:]), self.final_norm]
        residual = self.embedded(batch.tokens)
        rotary = self.rotary(batch)
        normed = layers[0][0].norm(residual)
        for index, ((attention, mlp), next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attended = attention(normed, batch, rotary, pages.layer(index))
            if index == num_layers - 1:  # behind the last keys and values only these rows matter
                residual, attended = (self._kernels.take_rows(x, batch.sampled) for x in (residual, attended))
            normed = next_norm.after(residual, mlp(mlp.norm.after(residual, attended)))
        return normed

    def embedded(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, H], new."""
        return self._embedding.rows(tokens)

    def rotary(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the batch's tokens."""
        return self._rope.rows(batch.positions, batch.rope_choice)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] float32."""
        return self._head.logits(hidden)

    def draw(self, hidden: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        """Tokens drawn from the `logits` of [R, H] up to `vocabulary`, and whether these were finite, [R] both."""
        return self._head.draw(hidden, vocabulary, filters)

    def head_weight(self) -> Tensor:
        """[V, H] float32: what `logits` multiplies by."""
        return self._head.linear.rows(torch.arange(self.spec.vocab_size, device=self.device)).float()

    def head(self) -> LinearHead:
        """`logits` and `draw` that keep the head in memory and nothing else of the model."""
        return self._head


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """The first layers of a decoder with its own final norm and head: a model like any other."""

    decoder: Decoder
    num_layers: int

    def rope_choice(self, length: int) -> int:
        return self.decoder.rope_choice(length)

    def forward(self, batch: Batch, pages: KVPages) -> Tensor:
        return self.decoder.forward_through(self.num_layers, batch, pages)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    def draw(self, hidden: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        return self.decoder.draw(hidden, vocabulary, filters)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Takes finished parts by name and puts the blocks of a layer together."""

    spec: ModelSpec
    parts: Parts
    kernels: Kernels

    def norm(self, part: str) -> RMSNorm:
        return RMSNorm(self.kernels, self.parts.vector(part), self.spec.norm_epsilon)

    def attention(self, index: int) -> Attention:
        layer, qk = f"layers.{index}", self.spec.query_key_norm
        return Attention(
            kernels=self.kernels,
            spec=self.spec,
            masking=Masking(self.spec.attention_scale, self.spec.windows[index]),
            norm=self.norm(f"{layer}.attention_norm"),
            qkv=self.parts.linear(f"{layer}.qkv"),
            query_norm=self.norm(f"{layer}.query_norm") if qk else unchanged,
            key_norm=self.norm(f"{layer}.key_norm") if qk else unchanged,
            output=self.parts.linear(f"{layer}.output"),
        )

    def mlp(self, index: int) -> MLP:
        layer = f"layers.{index}"
        return MLP(
            kernels=self.kernels,
            norm=self.norm(f"{layer}.mlp_norm"),
            gate_up=self.parts.linear(f"{layer}.gate_up"),
            down=self.parts.linear(f"{layer}.down"),
        )


def build_layer(spec: ModelSpec, parts: Parts, kernels: Kernels, index: int) -> tuple[Attention, MLP]:
    """One layer of a model."""
    build = _Builder(spec, parts, kernels)
    return build.attention(index), build.mlp(index)


def load_decoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: Kernels, weights: str = "native"
) -> Decoder:
    """Reads the weights straight into place, in the format `weights` (a value of `model.weights`).

    Raises ModelError naming the config field or tensor that is refused.
    """
    family = architecture(checkpoint.config)
    spec = family.spec(checkpoint.config)
    reader, plan = checkpoint.reader, family.weights(spec)
    places = model_places(reader, plan, spec.tied)
    balance = Balance(spec, reader, places, plan, kernels, dtype, device, build_layer)
    target = Target(weight_format(weights, kernels, dtype, device, balance), dtype, device)
    parts, tied = fill_parts(reader, places, plan, target), HEAD not in places
    head = parts.linear("head")
    rows = head.rows if tied else partial(kernels.take_rows, parts.vector("embedding"))
    decoder = Decoder(spec, parts, head, kernels, Embedding(rows, dtype, device))
    decoder.rounding = target.weights.rounding()
    give_back()
    return decoder
