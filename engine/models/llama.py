"""Llama 2 and 3, SmolLM2 and everything else of `model_type: llama`."""

from ..spec import ModelSpec
from .fields import DENSE_FIELDS, Config, dense_fields, flag, layer_windows, refuse_unknown
from .names import WeightPlan, dense_weights


def spec(config: Config) -> ModelSpec:
    refuse_unknown(config, DENSE_FIELDS | {"attention_bias", "mlp_bias"})
    fields = dense_fields(config)
    bias = flag(config, "attention_bias")
    return ModelSpec(
        **fields,
        windows=layer_windows(config, [None] * fields["num_layers"]),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
    )


def weights(spec: ModelSpec) -> WeightPlan:
    return dense_weights(spec)
