"""From the many spellings of rotary encoding in a config to one `RopeSpec`, or a refusal naming the key.

Knows where the numbers are written (old and new style), not what they compute.
"""

from collections.abc import Mapping
from typing import Any

from ..spec import ModelError, RopeSpec

ROPE_FIELDS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"})

# Per type: the keys it must have, and those it may have.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings"},
        {"factor", "attention_factor"},
    ),
}
_DEFAULT_THETA = 10_000.0


def rope_spec(config: Mapping[str, Any], head_dim: int, context: int) -> RopeSpec:
    """Raises ModelError naming an unknown type, an unknown or missing key, or two spellings that disagree."""
    values = _merged(config)
    kind = _kind(values)
    theta = _number("rope_theta", values.pop("rope_theta", _DEFAULT_THETA))
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config: rope key partial_rotary_factor is not supported for this model_type")
    _complete(kind, values, context)
    _check_keys(kind, values)
    _check_values(kind, values, head_dim)
    return RopeSpec(kind, theta, head_dim, context, values)


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """One dict of the old (`rope_scaling` and top level) and the new (`rope_parameters`) spelling."""
    old, new = _table(config, "rope_scaling"), _table(config, "rope_parameters")
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key]:
            raise ModelError(
                f"config fields rope_scaling and rope_parameters disagree on {key}: {old[key]}, {new[key]}"
            )
    values = old or new
    top, inner = config.get("rope_theta"), values.get("rope_theta", new.get("rope_theta"))
    if top is not None and inner is not None and top != inner:
        raise ModelError(f"config field rope_theta: {top} at the top level, {inner} in the rope dict")
    if top is not None or inner is not None:
        values["rope_theta"] = inner if top is None else top
    if config.get("original_max_position_embeddings") is not None:
        values["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return values


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A rope dict without null entries, its type under `rope_type`."""
    given = config.get(name)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config field {name}: must be a mapping, got {given!r}")
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(f"config field {name}: a dict per layer type ({', '.join(nested)}) is not supported")
    values = {key: value for key, value in given.items() if value is not None}
    spelled = values.pop("type", None)
    if spelled is not None and values.setdefault("rope_type", spelled) != spelled:
        raise ModelError(f"config field {name}: type {spelled!r} and rope_type {values['rope_type']!r} disagree")
    return values


def _kind(values: dict[str, Any]) -> str:
    kind = values.pop("rope_type", "default")
    if kind not in _KEYS:
        raise ModelError(f"config field rope_type: {kind!r} is not supported (there are: {', '.join(_KEYS)})")
    return str(kind)


def _complete(kind: str, values: dict[str, Any], context: int) -> None:
    """Fills in what a type takes from the model's context when the dict is silent."""
    original = "original_max_position_embeddings"
    if kind == "default":
        values.pop(original, None)
        return
    if original in _KEYS[kind][0]:
        values.setdefault(original, context)
    if kind == "yarn":
        values.setdefault("factor", context / values[original])


def _check_keys(kind: str, values: Mapping[str, Any]) -> None:
    required, optional = _KEYS[kind]
    for key in sorted(required - values.keys()):
        raise ModelError(f"config: rope type {kind!r} needs the key {key}")
    for key in sorted(values.keys() - required - optional):
        raise ModelError(f"config: key {key!r} of rope type {kind!r} is not understood")


def _check_values(kind: str, values: dict[str, Any], width: int) -> None:
    for key, value in values.items():
        if key in ("short_factor", "long_factor"):
            _check_list(key, value, width // 2)
        elif key != "truncate":
            _number(key, value)
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ModelError("config: rope key low_freq_factor must be below high_freq_factor")


def _check_list(key: str, value: Any, length: int) -> None:
    if not isinstance(value, (list, tuple)) or len(value) != length:
        raise ModelError(f"config: rope key {key} must be a list of {length} numbers")
    for item in value:
        _number(key, item)


def _number(key: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config: rope key {key} must be a number above 0, got {value!r}")
    return float(value)
