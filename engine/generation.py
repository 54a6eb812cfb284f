"""Settles the sampling every row starts from: the job's value, else the model's, else the neutral one.

Knows the order of precedence field by field; values of single rows come later and are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from .request import Sampling

if TYPE_CHECKING:
    from .config import GenerationSettings

Origin = Literal["job", "model", "default"]

_FROM_MODEL = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
)


def resolve_generation(settings: GenerationSettings, model: Mapping[str, Any]) -> tuple[Sampling, dict[str, Origin]]:
    """The sampling of a row without values of its own, and where each value came from.

    `model` is the content of the model's generation_config.json. A `do_sample: false` in it means greedy
    unless the job sets a temperature. Raises ValueError, with the key first, when a value is illegal.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for field in fields(Sampling):
        values[field.name], origins[field.name] = _choose(field.name, settings, model, field.default)
    return Sampling(**values), origins


def _choose(key: str, settings: GenerationSettings, model: Mapping[str, Any], neutral: Any) -> tuple[Any, Origin]:
    if key == "grammar":
        return settings.structure, "default" if settings.structure is None else "job"
    if key not in type(settings).model_fields:
        return neutral, "default"
    value = getattr(settings, key)
    if key in _FROM_MODEL:
        if value is not None:
            return value, "job"
        if key == "temperature" and model.get("do_sample") is False:
            return 0.0, "model"
        return (neutral, "default") if model.get(key) is None else (model[key], "model")
    return value, "job" if key in settings.model_fields_set else "default"
