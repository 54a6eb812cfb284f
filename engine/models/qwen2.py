"""Qwen2 and Qwen2.5: a bias on q, k and v always, none on o; no config field says so."""

from ..spec import ModelSpec
from .fields import DENSE_FIELDS, Config, dense_fields, qwen_windows, refuse_unknown
from .names import WeightPlan, dense_weights

WINDOW_FIELDS = {"use_sliding_window", "sliding_window", "max_window_layers"}


def spec(config: Config) -> ModelSpec:
    refuse_unknown(config, DENSE_FIELDS | WINDOW_FIELDS)
    fields = dense_fields(config)
    return ModelSpec(**fields, windows=qwen_windows(config, fields["num_layers"]), qkv_bias=True)


def weights(spec: ModelSpec) -> WeightPlan:
    return dense_weights(spec)
