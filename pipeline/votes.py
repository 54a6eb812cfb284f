"""The type of each JSONL column, settled over all of its rows by majority.

Knows Python values as JSON gives them, in batches; a value that fits no majority is left to be reported by its row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .schema import merge_types

UNFIT = (pa.ArrowException, OverflowError, ValueError, TypeError)


@dataclass(slots=True)
class _Candidate:
    kind: pa.DataType
    rows: int


class Votes:
    """Types seen per column, columns in order of appearance."""

    def __init__(self) -> None:
        self._columns: dict[str, list[_Candidate]] = {}
        self._contested: set[str] = set()

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Counts the values of some rows."""
        for name in dict.fromkeys(key for row in rows for key in row):
            self._vote(name, [row.get(name) for row in rows])

    def result(self) -> tuple[pa.Schema, frozenset[str]]:
        """The schema, and the columns in which some value does not fit it."""
        fields = []
        for name, candidates in self._columns.items():
            winner = max(candidates, key=lambda candidate: candidate.rows, default=None)
            fields.append(pa.field(name, winner.kind if winner else pa.null()))
        several = {name for name, candidates in self._columns.items() if len(candidates) > 1}
        return pa.schema(fields), frozenset(several | self._contested)

    def _vote(self, name: str, values: list[Any]) -> None:
        candidates = self._columns.setdefault(name, [])
        try:
            array = pa.array(values)
        except UNFIT:
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


def has_shape(value: Any, kind: pa.DataType) -> bool:
    """Whether objects stand where the type has structs and lists where it has lists; Arrow would take either."""
    if value is None:
        return True
    if pa.types.is_struct(kind):
        return isinstance(value, dict) and all(has_shape(value.get(field.name), field.type) for field in kind)
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(has_shape(item, kind.value_type) for item in value)
    return not isinstance(value, (dict, list))


def _infer(value: Any) -> pa.DataType | None:
    if isinstance(value, int) and 2**63 <= value < 2**64:
        return pa.uint64()
    try:
        return pa.array([value]).type
    except UNFIT:
        return None


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
