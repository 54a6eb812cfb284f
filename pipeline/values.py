"""Columns as Python values for templates, and what counts as a null among them.

Knows single columns; nulls inside lists and structs are ordinary content.
"""

from typing import Any

import pyarrow as pa


def is_null(value: Any) -> bool:
    """None and NaN."""
    return value is None or (isinstance(value, float) and value != value)


def to_python(column: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """The values of a column; where one has no Python form, None and the reason, by offset."""
    try:
        return column.to_pylist(), {}
    except (ValueError, OverflowError, pa.ArrowException):
        pairs = [_value(item) for item in column]
    return [value for value, _ in pairs], {at: text for at, (_, text) in enumerate(pairs) if text}


def _value(item: pa.Scalar) -> tuple[Any, str | None]:
    try:
        return item.as_py(), None
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return None, str(error) or type(error).__name__
