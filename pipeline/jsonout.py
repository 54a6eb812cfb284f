"""Rows as strict JSON: one object per line that every parser reads.

NaN and infinities become null, binary becomes base64, times become ISO 8601 text, decimals become text; durations are
whole numbers in the unit of their column. Knows Arrow types and JSON only.
"""

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from .schema import conform, record_batch


def json_lines(batch: pa.RecordBatch) -> Iterator[bytes]:
    """One line per row."""
    columns = [_textual(column) for column in batch.columns]
    schema = pa.schema([pa.field(field.name, column.type) for field, column in zip(batch.schema, columns, strict=True)])
    for row in record_batch(columns, schema, batch.num_rows).to_pylist():
        yield encode_row(row).encode("utf-8") + b"\n"


def encode_row(row: dict[str, Any]) -> str:
    """One row as a line of strict JSON, without its end."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_no_json)
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=_no_json)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _no_json(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def _textual(column: pa.Array) -> pa.Array:
    """The column with temporal values and decimals as text, wherever in it they stand."""
    target = _textual_type(column.type)
    return column if target.equals(column.type) else conform(column, target)


def _textual_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _textual_type(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_textual_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_textual_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_textual_type(kind.value_type)))
    if pa.types.is_duration(kind):
        return pa.int64()
    is_text = pa.types.is_temporal(kind) or pa.types.is_decimal(kind)
    return pa.string() if is_text else kind
