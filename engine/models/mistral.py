"""Mistral: Llama without biases, with one sliding window for all layers when `sliding_window` is a number."""

from ..spec import ModelSpec
from .fields import DENSE_FIELDS, Config, dense_fields, layer_windows, refuse_unknown, sliding_window
from .names import WeightPlan, dense_weights

_CLASS_WINDOW = 4096  # what the reference takes when the field is absent; null means no window


def spec(config: Config) -> ModelSpec:
    refuse_unknown(config, DENSE_FIELDS | {"sliding_window"})
    config = {"sliding_window": _CLASS_WINDOW, **config}
    fields = dense_fields(config)
    windows = [sliding_window(config)] * fields["num_layers"]
    return ModelSpec(**fields, windows=layer_windows(config, windows))


def weights(spec: ModelSpec) -> WeightPlan:
    return dense_weights(spec)
