"""Which JSON Schema keywords are honoured, each with its place; everything else is refused, never ignored.

Knows keywords and nesting; the meaning of a schema is llguidance's business.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 100  # schemas within schemas

_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly"),
    }
)
_VALUES = frozenset(
    {
        *("type", "enum", "const", "required", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minLength", "maxLength", "pattern", "format", "$ref"),
    }
)
_ONE_SCHEMA = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPPINGS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_EXACT = 2**53  # numbers become float64, which holds whole ones up to here one by one
_KNOWN = _ANNOTATIONS | _VALUES | _BOUNDS | _ONE_SCHEMA | _LISTS | _MAPPINGS
_AT_THE_TOP = frozenset({"x-guidance"})


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises ValueError naming the place of a keyword that is not honoured, or of a schema that is none."""
    waiting: list[tuple[str, Any, int]] = [("", schema, 0)]
    while waiting:
        place, part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"schemas are nested more than {MAX_DEPTH} deep")
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise ValueError(f"{place or 'it'}: must be a schema, got {part!r:.60}")
        allowed = _KNOWN if place else _KNOWN | _AT_THE_TOP
        unknown = [key for key in part if key not in allowed]
        if unknown:
            raise ValueError(f"{_join(place, unknown[0])}: keyword is not supported")
        _check_numbers(part, place)
        waiting += [(where, below, depth + 1) for where, below in _schemas_in(part, place)]


def _check_numbers(part: Mapping[str, Any], place: str) -> None:
    """Raises ValueError for numbers that would be taken for others near them."""
    for key in part.keys() & (_BOUNDS | {"const", "enum"}):
        for number in _numbers_in(part[key]):
            if not abs(number) <= _EXACT:
                raise ValueError(f"{_join(place, key)}: {number} is beyond 2^53, up to which numbers are exact")


def _numbers_in(value: Any) -> Iterator[float]:
    """Those in a JSON value."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, int | float):
            yield part
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()


def _schemas_in(part: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """(place, schema) of everything one level down that must be a schema."""
    for key, value in part.items():
        where = _join(place, key)
        if key in _ONE_SCHEMA:
            yield where, value
        elif key in _LISTS:
            if not isinstance(value, list):
                raise ValueError(f"{where}: must be a list of schemas, got {value!r:.60}")
            yield from ((f"{where}[{at}]", below) for at, below in enumerate(value))
        elif key in _MAPPINGS:
            if not isinstance(value, dict):
                raise ValueError(f"{where}: must be a mapping of schemas, got {value!r:.60}")
            yield from ((_join(where, name), below) for name, below in value.items())


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
