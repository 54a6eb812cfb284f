"""What counts as a null in a column: None and NaN, at the top only.

Knows Python values; nulls inside lists and structs are ordinary content.
"""

from typing import Any


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)
