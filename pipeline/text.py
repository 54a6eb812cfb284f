"""Text made safe: lone surrogates and broken UTF-8 become U+FFFD, in Python values and in Arrow columns.

Knows strings only; where they come from and how the replacements are reported is the caller's business.
"""

import re
from typing import Any

import pyarrow as pa

_SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def replace_surrogates(value: Any) -> tuple[Any, int]:
    """The value, nested ones included, with every lone surrogate replaced; how many there were."""
    if isinstance(value, str):
        return _SURROGATE.subn(REPLACEMENT, value) if not value.isascii() else (value, 0)
    if isinstance(value, list):
        pairs = [replace_surrogates(item) for item in value]
        return [item for item, _ in pairs], sum(count for _, count in pairs)
    if isinstance(value, dict):
        keys, in_keys = replace_surrogates(list(value))
        values, in_values = replace_surrogates(list(value.values()))
        return dict(zip(keys, values, strict=True)), in_keys + in_values
    return value, 0


def repair_text(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """The batch with valid UTF-8 in its string columns; how many characters were replaced.

    Raises pa.ArrowInvalid when something other than a plain string column is damaged.
    """
    try:
        batch.validate(full=True)
        return batch, 0
    except pa.ArrowInvalid:
        repaired = [_repair_column(column) for column in batch.columns]
    result = pa.RecordBatch.from_arrays([column for column, _ in repaired], schema=batch.schema)
    result.validate(full=True)
    return result, sum(count for _, count in repaired)


def _repair_column(column: pa.Array) -> tuple[pa.Array, int]:
    if column.type not in (pa.string(), pa.large_string()):
        return column, 0
    binary = column.view(pa.binary() if column.type == pa.string() else pa.large_binary())
    pairs = [(None, 0) if value is None else _decode(value) for value in binary.to_pylist()]
    return pa.array([text for text, _ in pairs], column.type), sum(count for _, count in pairs)


def _decode(value: bytes) -> tuple[str, int]:
    """A surrogate that was written as three bytes is one replacement, like any other broken sequence."""
    try:
        text = value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = value.decode("utf-8", "replace")
        return text, text.count(REPLACEMENT) - value.count(REPLACEMENT.encode())
    return _SURROGATE.subn(REPLACEMENT, text)
