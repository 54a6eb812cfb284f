"""Qwen3 dense: RMSNorm over each head of q and k before RoPE, and head_dim 128 unless the config says otherwise."""

from ..spec import ModelSpec
from .fields import DENSE_FIELDS, Config, dense_fields, flag, qwen_windows, refuse_unknown
from .names import WeightPlan, dense_weights
from .qwen2 import WINDOW_FIELDS

_CLASS_HEAD_DIM = 128


def spec(config: Config) -> ModelSpec:
    refuse_unknown(config, DENSE_FIELDS | WINDOW_FIELDS | {"attention_bias"})
    config = {"head_dim": _CLASS_HEAD_DIM, **config}
    fields = dense_fields(config)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **fields,
        windows=qwen_windows(config, fields["num_layers"]),
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm=True,
    )


def weights(spec: ModelSpec) -> WeightPlan:
    return dense_weights(spec)
