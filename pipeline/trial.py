"""Finds out whether an output can hold some columns before a row is generated: a row of made-up values goes through.

Knows Arrow types and sinks; writes only to a scratch directory that is removed again.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from .schema import is_list, null_batch
from .sink import OutputError, make_sink

OutputFormat = Literal["arrow", "parquet", "jsonl"]

_PLAIN_DEPTH = 8
_UNWRITABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError, RecursionError)


def require_writable(output_format: OutputFormat, schema: pa.Schema) -> None:
    """Raises OutputError naming the column that files of this format cannot hold."""
    problem = _problem(output_format, schema)
    if problem is None:
        return
    for field in schema:
        alone = _problem(output_format, pa.schema([field], schema.metadata))
        if alone is not None:
            raise OutputError(
                f"output.format: {output_format} cannot hold column {field.name!r} ({_short(field.type)}): {alone}; "
                "leave it out with output.columns, or choose another output.format"
            )
    raise OutputError(f"output.format: {output_format} cannot hold the columns {', '.join(schema.names)}: {problem}")


def is_plain(kind: pa.DataType, depth: int = 0) -> bool:
    """Whether every format is known to hold the type: text, numbers, truth values, and some levels of them."""
    if pa.types.is_struct(kind):
        return depth < _PLAIN_DEPTH and all(is_plain(field.type, depth + 1) for field in kind)
    if is_list(kind):
        return depth < _PLAIN_DEPTH and is_plain(kind.value_type, depth + 1)
    tests: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_float32,
        pa.types.is_float64,
    )
    return any(test(kind) for test in tests)


def sample_array(kind: pa.DataType) -> pa.Array:
    """One value of a type that is not null where the type allows it; its numbers are zero and its texts empty."""
    nested = _nested_sample(kind)
    if nested is not None:
        return nested
    if pa.types.is_null(kind):
        return pa.nulls(1)
    try:
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes(kind.bit_width // 8 + 16))])
    except ValueError:  # no fixed width
        return pa.array([b"" if "binary" in str(kind) else ""], kind)


def _nested_sample(kind: pa.DataType) -> pa.Array | None:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, sample_array(kind.storage_type))
    if types.is_struct(kind):
        children = [sample_array(field.type) for field in kind]
        return pa.StructArray.from_arrays(children, fields=list(kind)) if children else pa.array([{}], kind)
    if types.is_map(kind):
        return pa.MapArray.from_arrays([0, 1], sample_array(kind.key_type), sample_array(kind.item_type), kind)
    if types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(pa.array([0], kind.index_type), sample_array(kind.value_type))
    if types.is_run_end_encoded(kind):
        return pa.RunEndEncodedArray.from_arrays(pa.array([1], kind.run_end_type), sample_array(kind.value_type), kind)
    if types.is_union(kind):
        return _union_sample(kind)
    return _list_sample(kind)


def _union_sample(kind: pa.UnionType) -> pa.Array:
    children = [sample_array(field.type) for field in kind]
    names, codes = [field.name for field in kind], kind.type_codes
    chosen = pa.array([codes[0]], pa.int8())
    if kind.mode == "sparse":
        return pa.UnionArray.from_sparse(chosen, children, names, codes)
    return pa.UnionArray.from_dense(chosen, pa.array([0], pa.int32()), children, names, codes)


def _list_sample(kind: pa.DataType) -> pa.Array | None:
    types = pa.types
    if is_list(kind):
        arrays = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
        return arrays.from_arrays([0, 1], sample_array(kind.value_type), type=kind)
    if types.is_fixed_size_list(kind):
        values = [sample_array(kind.value_type)] * kind.list_size
        return pa.FixedSizeListArray.from_arrays(pa.concat_arrays(values), type=kind) if values else None
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        arrays = pa.ListViewArray if types.is_list_view(kind) else pa.LargeListViewArray
        return arrays.from_arrays([0], [1], sample_array(kind.value_type), type=kind)
    return None


def _problem(output_format: OutputFormat, schema: pa.Schema) -> str | None:
    if output_format == "jsonl" and any(_has_union(field.type) for field in schema):
        return "a value of several types has no settled JSON form"
    sink = make_sink(output_format, schema)
    with tempfile.TemporaryDirectory(prefix="batchgen-") as directory:
        path = Path(directory) / "trial"
        try:
            sink.write(path, [])
            sink.write(path, _rows(schema))
        except _UNWRITABLE as error:
            return _first_line(error)
        return _unreadable(path) if output_format == "parquet" else None


def _has_union(kind: pa.DataType) -> bool:
    return pa.types.is_union(kind) or any(_has_union(kind.field(at).type) for at in range(kind.num_fields))


def _rows(schema: pa.Schema) -> list[pa.RecordBatch]:
    """A row of nulls and one of values, picked as rows of a job are."""
    values = pa.RecordBatch.from_arrays([sample_array(field.type) for field in schema], schema=schema)
    nulls = null_batch(1, schema).filter(pa.array([True]))
    return [pa.concat_batches([values, nulls]).take(pa.array([1, 0])), values.take(pa.array([None, 0], pa.int64()))]


def _unreadable(path: Path) -> str | None:
    """Why Parquet files of this schema could be written and not read."""
    try:
        pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:120]


def _short(kind: pa.DataType) -> str:
    text = str(kind)
    return text if len(text) <= 80 else f"{text[:60]}..."
