"""What a checkpoint's quantization settings say: the method and its fields, checked. Imports no torch, reads no tensor.

Everything that is not understood is refused by name: a wrong guess here gives a model that talks nonsense. Values are
looked for in tuples: those of a damaged file may be lists, which no table can look up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..spec import ModelError

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
PLAIN = "plain"  # nothing is packed: only the KV cache was meant to be
_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Scheme:
    """`method`: gptq, gptq_v2, awq, pack-, int- or float-quantized, fp8, or plain.

    `group`: inputs of a scale, -1 for all of them; `block`: outputs and inputs of a scale, where it is for blocks;
    `reordered`: the inputs of a group lie anywhere, so that every module must say which group each belongs to.
    """

    method: str
    bits: int
    group: int
    symmetric: bool
    block: tuple[int, int] | None = None
    reordered: bool = False


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config, None for plain numbers. Raises ModelError naming what is not supported."""
    for field in _FIELDS:
        settings = config.get(field)
        if not settings:
            continue
        if not isinstance(settings, Mapping):
            raise ModelError(f"config field {field}: must be a mapping, got {str(settings)[:60]!r}")
        method = settings.get("quant_method", "unnamed")
        if method not in METHODS:
            known = ", ".join(METHODS)
            raise ModelError(
                f"config field {field}: quantisation method {method!r} is not supported (there are: {known}); "
                "use the unquantised checkpoint or a .gguf of it"
            )
        return _PARSE[method](settings, field)
    return None


def _refuse(field: str, name: str, value: object) -> ModelError:
    return ModelError(f"config field {field}.{name}: {str(value)[:60]!r} is not supported")


def _mapping(settings: Mapping[str, Any], field: str, name: str) -> Mapping[str, Any]:
    """An empty one where nothing is said."""
    value = settings.get(name) or {}
    if not isinstance(value, Mapping):
        raise _refuse(field, name, value)
    return value


def _bits(settings: Mapping[str, Any], field: str, name: str, known: tuple[int, ...]) -> int:
    bits = settings.get(name)
    if bits not in known:
        raise _refuse(field, name, bits)
    return int(bits)


def _group(settings: Mapping[str, Any], field: str) -> int:
    group = settings.get("group_size", -1)
    group = -1 if group is None else group
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and group < 1):
        raise _refuse(field, "group_size", group)
    return group


def _gptq(settings: Mapping[str, Any], field: str) -> Scheme:
    if settings.get("dynamic"):
        raise _refuse(field, "dynamic", settings["dynamic"])
    name = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if name not in ("gptq", "gptq_v2"):
        raise _refuse(field, "checkpoint_format", name)
    return Scheme(
        name,
        _bits(settings, field, "bits", (4, 8)),
        _group(settings, field),
        bool(settings.get("sym", True)),
        reordered=bool(settings.get("desc_act")) and not settings.get("static_groups"),
    )


def _awq(settings: Mapping[str, Any], field: str) -> Scheme:
    version = settings.get("version") or settings.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise _refuse(field, "version", version)
    bits = _bits(settings, field, "bits" if "bits" in settings else "w_bit", (4,))
    group = {"group_size": settings.get("group_size", settings.get("q_group_size", -1))}
    return Scheme("awq", bits, _group(group, field), False)


def _compressed(settings: Mapping[str, Any], field: str) -> Scheme:
    for name in ("transform_config", "sparsity_config"):
        if settings.get(name) and _mapping(settings, field, name).get("format") != "dense":
            raise _refuse(field, name, settings[name])
    named = _mapping(settings, field, "config_groups")
    groups = [_mapping(named, f"{field}.config_groups", name) for name in named]
    if not groups and settings.get("kv_cache_scheme"):
        return Scheme(PLAIN, 16, -1, True)
    kinds = [(group.get("format") or settings.get("format"), _mapping(group, field, "weights")) for group in groups]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        raise _refuse(field, "config_groups", f"{len(groups)} groups")
    layout, weights = kinds[0]
    if layout not in tuple(_COMPRESSED) or weights.get("type", "int") != _COMPRESSED[layout].type:
        raise _refuse(field, "format", layout)
    bits = _bits(weights, f"{field}.weights", "num_bits", _COMPRESSED[layout].bits)
    if any(_mapping(group, field, "input_activations").get("symmetric") is False for group in groups):
        raise _refuse(field, "input_activations.symmetric", False)
    if layout == "float-quantized":
        return Scheme(layout, bits, -1, True, _compressed_block(weights, f"{field}.weights"))
    order = weights.get("actorder") or None
    if order not in tuple(_ACTIVATION_ORDERS):
        raise _refuse(f"{field}.weights", "actorder", order)
    symmetric = bool(weights.get("symmetric", True))
    return Scheme(layout, bits, _group(weights, field), symmetric, reordered=_ACTIVATION_ORDERS[order])


def _compressed_block(weights: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    strategy = weights.get("strategy") or "tensor"
    if strategy == "group":
        return 1, _group(weights, field)
    if strategy not in ("tensor", "channel", "block"):
        raise _refuse(field, "strategy", strategy)
    return _block(weights, field, "block_structure") if strategy == "block" else None


def _block(settings: Mapping[str, Any], field: str, name: str) -> tuple[int, int]:
    sizes = settings.get(name)
    if not isinstance(sizes, list) or len(sizes) != 2 or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise _refuse(field, name, sizes)
    return sizes[0], sizes[1]


def _fp8(settings: Mapping[str, Any], field: str) -> Scheme:
    if settings.get("fmt", "e4m3") != "e4m3":
        raise _refuse(field, "fmt", settings["fmt"])
    blocked = settings.get("weight_block_size") is not None
    return Scheme("fp8", 8, -1, True, _block(settings, field, "weight_block_size") if blocked else None)


@dataclass(frozen=True, slots=True)
class _Numbers:
    type: str
    bits: tuple[int, ...]


_ACTIVATION_ORDERS = {None: False, True: True, "group": True, "dynamic": True, "weight": False, "static": False}
_COMPRESSED = {
    "pack-quantized": _Numbers("int", (4, 8)),
    "int-quantized": _Numbers("int", (8,)),
    "float-quantized": _Numbers("float", (8,)),
}
_PARSE = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8}
