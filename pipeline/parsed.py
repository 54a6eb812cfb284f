"""Answers in JSON as values of one Arrow type: the type a schema comes to, and texts turned into its values.

Knows schemas and texts; what has no single Arrow type is kept as JSON text.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from .text import replace_surrogates

JSON_TEXT = pa.string()
_PLAIN = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "null": pa.null(),
}
_PYTHON: dict[pa.DataType, tuple[type, ...]] = {
    pa.string(): (str,),
    pa.int64(): (int,),
    pa.float64(): (int, float),
    pa.bool_(): (bool,),
}
_DECIDING = frozenset(
    {"$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type", "properties", "items", "prefixItems"}
)
_ANY_TYPE = ("string", "integer")  # alternatives that differ
MAX_PARTS = 10_000  # of a type


class ParseError(ValueError):
    """The answer is not a value of the type: one line."""


class Json:
    """The mark of a place in a type that holds JSON text of any value."""


Shape = Any  # Json | pa.DataType | list of one Shape | dict of Shapes: what the values look like before Arrow


class AnswerParser:
    """Turns answers into values of `type`, which a JSON Schema decides once for all rows.

    An object becomes a struct of the properties it names (others stand in the text alone), an array a list. What has no
    single Arrow type (alternatives that differ, recursion, objects without names) is JSON text. Raises ValueError for a
    schema whose type would be too large.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._shape = _Shapes(schema).of(schema)
        self.type = _type(self._shape)

    def parse(self, text: str) -> Any:
        """The value as Arrow takes it, lone surrogates replaced by U+FFFD. Raises ParseError."""
        try:
            read = json.loads(text, parse_constant=_no_constant, parse_int=_whole, parse_float=_fraction)
            return _value(replace_surrogates(read)[0], self._shape, "")
        except RecursionError:
            raise ParseError("it is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise ParseError(f"it is no JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None


def _no_constant(name: str) -> None:
    raise ParseError(f"{name} is no JSON")


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python's bound for the digits of a number
        raise ParseError(f"{digits:.20}... has {len(digits)} digits") from None


def _fraction(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ParseError(f"{digits:.60} is beyond the range of a double")
    return value


class _Shapes:
    """Shapes of the parts of one schema; references are looked up in the whole."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_parts = 0

    def of(self, schema: Any, active: frozenset[str] = frozenset()) -> Shape:
        """`active`: references that are being followed. One that leads back to itself has no type of its own."""
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ValueError(f"the schema comes to a type of more than {MAX_PARTS} parts")
        if not isinstance(schema, Mapping):
            return Json
        keys = set(schema) & _DECIDING
        if "$ref" in keys:
            reference = schema["$ref"]
            alone = keys == {"$ref"} and reference not in active
            return self.of(self._target(reference), active | {reference}) if alone else Json
        if keys & {"const", "enum"}:
            return _of_values([schema["const"]] if "const" in schema else schema["enum"])
        if keys & {"anyOf", "oneOf", "allOf"}:
            (*_, parts) = (schema[key] for key in ("anyOf", "oneOf", "allOf") if key in keys)
            single = len(keys) == 1 and ("allOf" not in keys or len(parts) == 1)
            return _common(self.of(part, active) for part in parts) if single else Json
        kinds = schema.get("type", _ANY_TYPE)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return _common(self._of_kind(kind, schema, active) for kind in kinds)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], active: frozenset[str]) -> Shape:
        if kind == "object":
            return {name: self.of(part, active) for name, part in schema.get("properties", {}).items()} or Json
        if kind == "array":
            rest = schema.get("items", True)
            parts = [*schema.get("prefixItems", ()), *([] if rest is False else [rest])]
            return [_common(self.of(part, active) for part in parts)]
        return _PLAIN[kind]

    def _target(self, reference: str) -> Any:
        """The schema that a pointer from the root names; True, which allows anything, for names of other kinds."""
        if not reference.startswith("#/"):
            return self._root if reference == "#" else True
        found: Any = self._root
        for part in unquote(reference[2:]).split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            found = found[int(key)] if isinstance(found, list) else found[key]
        return found


def _of_values(values: Iterable[Any]) -> Shape:
    def shape(value: Any) -> Shape:
        if isinstance(value, int) and not _fits_int64(value):
            return Json
        plain = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}.get(type(value))
        return Json if plain is None else _PLAIN[plain]

    return _common(map(shape, values))


def _common(shapes: Iterable[Shape]) -> Shape:
    """The one shape of all; null goes with everything, whole numbers with fractions."""
    found: Shape = pa.null()
    for shape in shapes:
        if found == pa.null() or found == shape:
            found = shape
        elif shape == pa.null():
            continue
        elif _is_number(found) and _is_number(shape):
            found = pa.float64()
        else:
            return Json
    return found


def _is_number(shape: Shape) -> bool:
    return isinstance(shape, pa.DataType) and shape in (pa.int64(), pa.float64())


def _type(shape: Shape) -> pa.DataType:
    """A place that is always null has JSON text's type: not every reader knows a type for nothing."""
    if isinstance(shape, dict):
        return pa.struct([(name, _type(part)) for name, part in shape.items()])
    if isinstance(shape, list):
        return pa.list_(_type(shape[0]))
    return JSON_TEXT if shape is Json or shape == pa.null() else shape


def _value(value: Any, shape: Shape, place: str) -> Any:
    """`value` as Arrow takes it. Raises ParseError naming the place that does not fit."""
    if shape is Json:
        return json.dumps(value, ensure_ascii=False)
    if value is None:
        return None
    if isinstance(shape, dict) and isinstance(value, dict):
        return {name: _value(value.get(name), part, f"{place}.{name}") for name, part in shape.items()}
    if isinstance(shape, list) and isinstance(value, list):
        return [_value(item, shape[0], f"{place}[{at}]") for at, item in enumerate(value)]
    if isinstance(shape, (dict, list)) or not _fits(value, shape):
        raise ParseError(f"{place.lstrip('.') or 'it'} is {value!r:.60}, which is no {_name(shape)}")
    return _double(value) if shape == pa.float64() else value


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ParseError(f"{value!s:.20}... is beyond the range of a double") from None


def _fits_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _fits(value: Any, kind: pa.DataType) -> bool:
    if isinstance(value, bool) or kind == pa.bool_():
        return isinstance(value, bool) and kind == pa.bool_()
    if kind == pa.int64() and isinstance(value, int):
        return _fits_int64(value)
    return isinstance(value, _PYTHON.get(kind, ()))


def _name(shape: Shape) -> str:
    return "object" if isinstance(shape, dict) else "array" if isinstance(shape, list) else str(shape)
