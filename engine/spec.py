"""What a decoder computes, as plain numbers: the one description every model family is turned into.

Knows no tensors, no files and no family names; `engine/models` writes it, `engine/decoder.py` builds from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ModelError(Exception):
    """A model that is refused or cannot be had: one line naming the place and the cure."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position encoding: which formula, and the numbers it takes (formulas in `engine/rope.py`)."""

    kind: str
    theta: float
    width: int  # leading elements of a head that are rotated, even
    context: int  # max_position_embeddings
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query attention, half-split RoPE and a SwiGLU MLP."""

    model_type: str
    vocab_size: int  # rows of embedding and head; a tokenizer may have fewer
    context_length: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer: keys a query sees, itself included; None: all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    tied: bool = False  # the head is the embedding

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)
