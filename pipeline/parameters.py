"""Sampling of a row: the job's, with the values that columns of the row override.

Knows names and values; equal overrides give one and the same record, checked once.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, get_args

from batchgen.engine.config import PerRowKey
from batchgen.engine.request import Sampling

from .values import is_null

KEYS: frozenset[str] = frozenset(get_args(PerRowKey))
_WHOLE = frozenset({"max_tokens", "min_tokens", "top_k", "seed"})


class Parameters:
    """`per_row` maps a key of `generation` to the column that overrides it; a null leaves the job's value."""

    def __init__(self, base: Sampling, per_row: Mapping[str, str]) -> None:
        unknown = sorted(per_row.keys() - KEYS)
        if unknown:
            raise ValueError(f"generation.per_row: {unknown[0]} cannot differ per row")
        self.base = base
        self._per_row = dict(per_row)
        self._replace = lru_cache(maxsize=4096)(self._checked)

    def of(self, row: Mapping[str, Any]) -> Sampling:
        """The sampling of a row. Raises ValueError naming key and column when a value is illegal."""
        if not self._per_row:
            return self.base
        given = {key: row[column] for key, column in self._per_row.items() if not is_null(row[column])}
        return self._replace(tuple((key, _plain(key, value)) for key, value in given.items()))

    def _checked(self, overrides: tuple[tuple[str, Any], ...]) -> Sampling:
        try:
            return replace(self.base, **dict(overrides))
        except (ValueError, TypeError) as error:
            key = str(error).split(":")[0]
            column = self._per_row.get(key)
            raise ValueError(f"{error} (column {column!r})" if column else str(error)) from error


def _plain(key: str, value: Any) -> Any:
    """A value that can be looked up: whole numbers may come as floats, as columns with nulls often hold them.

    One stop string may stand alone; what is no string becomes None, which Sampling refuses.
    """
    if key in _WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    if key == "stop":
        values = value if isinstance(value, list) else [value]
        return tuple(item if isinstance(item, str) else None for item in values)
    return value if isinstance(value, (int, float, str)) else repr(value)
