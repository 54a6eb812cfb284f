"""The type of each JSONL column: what an earlier run settled, else the majority of all of its rows.

Knows Python values as JSON gives them, in batches; a value that fits neither is left to be reported by its row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa

from .schema import extend_type, fits, is_list, merge_types

MAX_LEVELS = 62  # of lists and objects in a column, the most that Arrow files hold
UNFIT = (pa.ArrowException, OverflowError, ValueError, TypeError)


@dataclass(slots=True)
class _Candidate:
    kind: pa.DataType
    rows: int


class Votes:
    """Types seen per column, columns in order of appearance; a type in `settled` holds whatever is seen."""

    def __init__(self, settled: pa.Schema | None = None) -> None:
        self._settled = {field.name: field.type for field in settled or ()}
        self._columns: dict[str, list[_Candidate]] = {}
        self._contested: set[str] = set()
        self._with_nan: set[str] = set()

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Counts the values of some rows."""
        for name in dict.fromkeys(key for row in rows for key in row):
            self._vote(name, [row.get(name) for row in rows])

    def result(self) -> tuple[pa.Schema, frozenset[str]]:
        """The schema, and the columns in which some value does not fit it."""
        kinds = {name: self._decide(name, candidates) for name, candidates in self._columns.items()}
        contested = {
            name
            for name, candidates in self._columns.items()
            if name in self._contested or not all(fits(candidate.kind, kinds[name]) for candidate in candidates)
        }
        return pa.schema(list(kinds.items())), frozenset(contested)

    def _decide(self, name: str, candidates: list[_Candidate]) -> pa.DataType:
        ranked = sorted(candidates, key=lambda candidate: -candidate.rows)
        if name in self._with_nan and all(pa.types.is_integer(candidate.kind) for candidate in ranked[:1]):
            ranked = [_Candidate(pa.float64(), 0)]  # among numbers alone NaN is one
        if name not in self._settled:
            return ranked[0].kind if ranked else pa.null()
        return reduce(lambda kind, candidate: extend_type(kind, candidate.kind), ranked, self._settled[name])

    def _vote(self, name: str, values: list[Any]) -> None:
        candidates = self._columns.setdefault(name, [])
        if any(map(is_nan, values)):
            self._with_nan.add(name)
            values = without_nan(values)
        try:
            array = pa.array(values)
        except UNFIT:
            self._vote_singly(name, candidates, values)
            return
        if not _describes(array.type, values):
            self._vote_singly(name, candidates, values)
            return
        _count(candidates, array.type, len(array) - array.null_count)

    def _vote_singly(self, name: str, candidates: list[_Candidate], values: Iterable[Any]) -> None:
        for value in values:
            kind = _infer(value)
            if kind is None:
                self._contested.add(name)
            else:
                _count(candidates, kind, 1)


def as_floats(value: Any, kind: pa.DataType) -> Any:
    """The value with floats for the whole numbers in it that stand for floats and are equal to one.

    Arrow takes whole numbers up to 2**53 by itself and refuses all others.
    """
    if pa.types.is_floating(kind) and type(value) is int:
        return float(value) if is_exact(value) else value
    if is_list(kind) and isinstance(value, list):
        return [as_floats(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {field.name: as_floats(value.get(field.name), field.type) for field in kind}
    return value


def is_exact(number: int) -> bool:
    """Whether a double is equal to a whole number."""
    try:
        return float(number) == number
    except OverflowError:
        return False


def is_nan(value: Any) -> bool:
    """Whether a value is NaN, which means null wherever it cannot stand as a number."""
    return type(value) is float and value != value


def without_nan(values: list[Any]) -> list[Any]:
    """The values with nulls for NaN."""
    return [None if is_nan(value) else value for value in values]


def has_shape(value: Any, kind: pa.DataType) -> bool:
    """Whether objects, lists and numbers stand where the type has them; Arrow would take what does not fit."""
    if value is None:
        return True
    if pa.types.is_struct(kind):
        return isinstance(value, dict) and all(has_shape(value.get(field.name), field.type) for field in kind)
    if is_list(kind):
        return isinstance(value, list) and all(has_shape(item, kind.value_type) for item in value)
    if pa.types.is_integer(kind) and isinstance(value, float):
        return value.is_integer()
    if pa.types.is_floating(kind):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return not isinstance(value, (dict, list))


def _infer(value: Any) -> pa.DataType | None:
    if isinstance(value, int) and 2**63 <= value < 2**64:
        return pa.uint64()
    try:
        kind = pa.array([value]).type
    except UNFIT:
        return None
    return kind if _describes(kind, [value]) else None


def _describes(kind: pa.DataType, values: list[Any]) -> bool:
    """Whether Arrow's type is that of all values: it takes truth values among floats for numbers."""
    if _levels(kind) > MAX_LEVELS:
        return False
    return not _has_floats(kind) or all(has_shape(value, kind) for value in values)


def _has_floats(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or any(_has_floats(kind.field(at).type) for at in range(kind.num_fields))


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested deeper in a value than a column can be."""
    level, depth = [value], 0
    while level and depth <= MAX_LEVELS:
        items = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [inner for item in items for inner in item]
        depth += bool(items)
    return depth > MAX_LEVELS


def _levels(kind: pa.DataType) -> int:
    level, depth = [kind], 0
    while level := [inner.field(at).type for inner in level for at in range(inner.num_fields)]:
        depth += 1
    return depth


def _count(candidates: list[_Candidate], kind: pa.DataType, rows: int) -> None:
    if pa.types.is_null(kind):
        return
    for candidate in candidates:
        merged = _merge(candidate.kind, kind)
        if merged is not None:
            candidate.kind = merged
            candidate.rows += rows
            return
    candidates.append(_Candidate(kind, rows))


def _merge(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """As between files, but whole numbers beyond 63 bits make an unsigned column, negative ones then do not fit."""
    if {one, other} == {pa.int64(), pa.uint64()}:
        return pa.uint64()
    return merge_types(one, other)
