"""Turns what pydantic found wrong with a job file, or a section of one, into one line for its author.

Knows the form of the message and the wording of each kind of error, not the settings themselves.
"""

import difflib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

S = TypeVar("S", bound=BaseModel)
_KEYED = re.compile(r"([a-z][a-z0-9_]*): (.*)", re.DOTALL)
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
    "finite_number": "a finite number",
}


def explain(error: ValidationError, document: Mapping[str, Any], model: type[BaseModel], place: str = "") -> str:
    """`generation.temprature: unknown key, did you mean temperature?` for the first problem found.

    `place`: where the document itself stands.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for item in _of_its_kind([dict(item) for item in error.errors(include_url=False)]):
        found.setdefault(_path(item, document), []).append(item)
    first = next(iter(found))
    path = next((path for path in found if path.startswith(f"{first}.")), first)  # a mapping: what is wrong in it
    items = found[path]
    where = ".".join(part for part in (place, path) if part)
    return f"{where}: {_reason(items, model)}" if where else _reason(items, model)


def validated(section: type[S], values: Mapping[str, Any], place: str = "") -> S:
    """The section with these values. Raises ValueError, in one line that begins with the place."""
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(explain(error, values, section, place)) from None


def _of_its_kind(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what sections of another `kind` find wrong with a mapping; its kind alone where no section has it."""
    others = {item["loc"][:-1] for item in items if item["loc"][-1:] == ("kind",) and item["type"] == "literal_error"}
    left = [item for item in items if item["loc"][:-1] not in others]
    if any(item["loc"][:-2] == other[:-1] for item in left for other in others):
        return left
    return [item for item in items if item["loc"][:-1] not in others or item["loc"][-1] == "kind"]


def _path(item: Mapping[str, Any], document: Any) -> str:
    """The place in the document, without the branches of unions that pydantic adds to it."""
    path, node = "", document
    location = item["loc"]
    for index, key in enumerate(location):
        last = index == len(location) - 1
        if isinstance(node, Mapping) and (key in node or (last and item["type"] == "missing")):
            path, node = f"{path}.{key}" if path else str(key), node.get(key)
        elif isinstance(node, Sequence) and not isinstance(node, str) and isinstance(key, int) and key < len(node):
            path, node = f"{path}[{key}]", node[key]
    keyed = _keyed(item)
    return path if keyed is None else f"{path}.{keyed[0]}".lstrip(".")


def _keyed(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """Key and message of a validator that speaks about one key of its section."""
    if item["type"] != "value_error":
        return None
    match = _KEYED.fullmatch(str(item["ctx"]["error"]))
    return (match[1], match[2]) if match and isinstance(item["input"], (Mapping, BaseModel)) else None


def _reason(items: list[dict[str, Any]], model: type[BaseModel]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        return _unknown(str(first["loc"][-1]), _known_keys(model, first["loc"][:-1]))
    if first["type"] == "missing":
        return "is missing"
    for item in items:
        if item["type"] == "value_error":
            keyed = _keyed(item)
            return keyed[1] if keyed else str(item["ctx"]["error"])
    if first["loc"] and first["loc"][-1] == "[key]":
        return f"must be one of {_expected(first)}"
    if any(item["type"] in ("too_short", "string_too_short") for item in items):
        return "must not be empty"
    wanted = [_expected(item) for item in items]
    if any(text is None for text in wanted):
        return _plain(first)
    return f"must be {_either([text for text in wanted if text])}, got {_short(first['input'])}"


def _expected(item: Mapping[str, Any]) -> str | None:
    if item["type"] == "literal_error":
        return str(item["ctx"]["expected"]).replace("'", "")
    return _TYPES.get(item["type"])


def _plain(item: Mapping[str, Any]) -> str:
    message = re.sub(r"^(Input|Value|String|Tuple|List|Dictionary) should", "must", item["msg"])
    return f"{message[0].lower()}{message[1:]}, got {_short(item['input'])}"


def _short(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _either(parts: list[str]) -> str:
    unique = list(dict.fromkeys(parts))
    return " or ".join(unique)


def _unknown(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"unknown key, did you mean {close[0]}?" if close else f"unknown key, known are {', '.join(known)}"


def _known_keys(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    candidates = [model]
    for key in location:
        candidates = [inner for candidate in candidates for inner in _step(candidate, key)] or candidates
    return [name for candidate in candidates for name in candidate.model_fields]


def _step(model: type[BaseModel], key: Any) -> list[type[BaseModel]]:
    if isinstance(key, str) and key == model.__name__:
        return [model]
    if not isinstance(key, str) or key not in model.model_fields:
        return []
    return _models_in(model.model_fields[key].annotation)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if typing.get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models_in(inner)]
