"""Where every tensor of a checkpoint goes: name -> rows of a part of the decoder.

Knows names and shapes in the Hugging Face spelling; neither formats nor values.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place: rows `row`.. of the weight, bias or vector `part` of the decoder."""

    part: str  # "embedding", "norm", "head", "layers.N.qkv", ...
    row: int
    shape: Shape
    bias: bool = False


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """All tensors a model has. `linears`: part -> (outputs, inputs); `skip`: names that carry nothing."""

    places: Mapping[str, Place]
    linears: Mapping[str, tuple[int, int]]
    skip: re.Pattern[str]


# Old Llama exports carry the RoPE frequencies as a buffer; they follow from the config.
_SKIP = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def dense_weights(spec: ModelSpec) -> WeightPlan:
    """The plan of a dense model: embedding, final norm, head, and per layer the fused projections and norms."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    places = {
        "model.embed_tokens.weight": Place("embedding", 0, (vocab, hidden)),
        "model.norm.weight": Place("norm", 0, (hidden,)),
        "lm_head.weight": Place("head", 0, (vocab, hidden)),
    }
    linears = {"head": (vocab, hidden)}
    for index in range(spec.num_layers):
        more_places, more_linears = layer_weights(spec, f"model.layers.{index}", f"layers.{index}")
        places |= more_places
        linears |= more_linears
    return WeightPlan(places, linears, _SKIP)


def layer_weights(spec: ModelSpec, source: str, target: str) -> tuple[dict[str, Place], dict[str, tuple[int, int]]]:
    """Places and linears of one layer: its tensors are called `source`.*, its parts `target`.*."""
    places, linears = dict(_layer_vectors(spec, source, target)), {}
    for part, inputs, projections, bias in _layer_linears(spec):
        places.update(_rows(source, f"{target}.{part}", inputs, projections, bias))
        linears[f"{target}.{part}"] = (sum(rows for _, rows in projections), inputs)
    return places, linears


def _layer_vectors(spec: ModelSpec, source: str, target: str) -> Iterator[tuple[str, Place]]:
    yield f"{source}.input_layernorm.weight", Place(f"{target}.attention_norm", 0, (spec.hidden_size,))
    yield f"{source}.post_attention_layernorm.weight", Place(f"{target}.mlp_norm", 0, (spec.hidden_size,))
    if spec.query_key_norm:
        yield f"{source}.self_attn.q_norm.weight", Place(f"{target}.query_norm", 0, (spec.head_dim,))
        yield f"{source}.self_attn.k_norm.weight", Place(f"{target}.key_norm", 0, (spec.head_dim,))


def _layer_linears(spec: ModelSpec) -> Iterator[tuple[str, int, list[tuple[str, int]], bool]]:
    """(part, inputs, [(projection, rows)], has bias); projections of one part are stacked in this order."""
    query, key, hidden, inner = spec.query_size, spec.key_size, spec.hidden_size, spec.intermediate_size
    qkv = [("self_attn.q_proj", query), ("self_attn.k_proj", key), ("self_attn.v_proj", key)]
    yield "qkv", hidden, qkv, spec.qkv_bias
    yield "output", query, [("self_attn.o_proj", hidden)], spec.output_bias
    yield "gate_up", hidden, [("mlp.gate_proj", inner), ("mlp.up_proj", inner)], spec.mlp_bias
    yield "down", inner, [("mlp.down_proj", hidden)], spec.mlp_bias


def _rows(
    source: str, part: str, inputs: int, projections: list[tuple[str, int]], bias: bool
) -> Iterator[tuple[str, Place]]:
    row = 0
    for projection, rows in projections:
        yield f"{source}.{projection}.weight", Place(part, row, (rows, inputs))
        if bias:
            yield f"{source}.{projection}.bias", Place(part, row, (rows,), bias=True)
        row += rows
