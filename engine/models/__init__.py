"""The model families: from a checkpoint's config to a `ModelSpec`, or a refusal naming the field.

A family is a module with `spec(config)` and `weights(spec)`; it stands in the table below under its `model_type`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from ..spec import ModelError, ModelSpec
from ..weights.schemes import scheme
from . import llama, mimo, mistral, qwen2, qwen3
from .names import WeightPlan


class Architecture(Protocol):
    """One model family."""

    def spec(self, config: Mapping[str, Any]) -> ModelSpec: ...

    def weights(self, spec: ModelSpec) -> WeightPlan: ...


ARCHITECTURES: dict[str, Architecture] = {
    "llama": llama,
    "mimo": mimo,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The family of a config. Raises ModelError naming an unknown `model_type` or quantisation."""
    scheme(config)
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"config field model_type: {model_type!r} is not supported (there are: {known})")
    return ARCHITECTURES[model_type]
