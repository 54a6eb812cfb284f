"""MiMo: Qwen2 whose checkpoints also ship layers that predict a further token; the model itself does not run them.

The layout of such a layer is that of the published checkpoints, as vLLM's `mimo_mtp.py` reads it.
"""

import re
from dataclasses import replace

from ..spec import ModelSpec
from . import qwen2
from .fields import Config
from .names import Place, WeightPlan, dense_weights, layer_weights

PREDICTION_FIELDS = {"attention_bias", "num_nextn_predict_layers"}  # the bias is Qwen2's, whatever the first says
_PREDICTION = "model.mtp_layers"


def spec(config: Config) -> ModelSpec:
    return qwen2.spec({name: value for name, value in config.items() if name not in PREDICTION_FIELDS})


def weights(spec: ModelSpec) -> WeightPlan:
    plan = dense_weights(spec)
    return replace(plan, skip=re.compile(rf"{plan.skip.pattern}|{re.escape(_PREDICTION)}\..*"))


def prediction_weights(spec: ModelSpec) -> WeightPlan:
    """Of the first of these layers: norms of the token and of the state before it, their projection, a usual layer."""
    source, hidden = f"{_PREDICTION}.0", spec.hidden_size
    places, linears = layer_weights(spec, source, "layers.0")
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        places[f"{source}.{name}.weight"] = Place(name, 0, (hidden,))
    places[f"{source}.input_proj.weight"] = Place("input", 0, (hidden, 2 * hidden))
    return WeightPlan(places, {**linears, "input": (hidden, 2 * hidden)}, re.compile(rf"(?!{re.escape(source)}\.).*"))
