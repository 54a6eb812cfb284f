"""Arrow types of several files or blocks brought together: the common type, and columns converted to it.

Knows types and arrays only; values never leave Arrow.
"""

from collections.abc import Collection, Iterable

import pyarrow as pa
import pyarrow.compute as pc

_SIGNED = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


def merge_types(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The narrowest type that holds the values of both unchanged; None when there is none."""
    if one.equals(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_null(other):
        return one
    if _is_number(one) and _is_number(other):
        return _merge_numbers(one, other)
    if {one, other} == {pa.string(), pa.large_string()}:
        return pa.large_string()
    if {one, other} == {pa.binary(), pa.large_binary()}:
        return pa.large_binary()
    return _merge_nested(one, other)


def extend_type(settled: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """The settled type, with what `kind` adds where nothing was known: nulls, and fields of structs.

    What was settled stays, so values of `kind` may not fit; `fits` tells whether all do.
    """
    if pa.types.is_null(settled):
        return kind
    if pa.types.is_struct(settled) and pa.types.is_struct(kind):
        return pa.struct(extend_fields(settled, kind))
    if is_list(settled) and is_list(kind):
        item = settled.value_field.with_type(extend_type(settled.value_type, kind.value_type))
        return pa.large_list(item) if pa.types.is_large_list(settled) else pa.list_(item)
    return settled


def extend_fields(settled: Iterable[pa.Field], other: Iterable[pa.Field]) -> list[pa.Field]:
    """As `extend_type`, for the fields of schemas and structs."""
    fields = {field.name: field for field in settled}
    for field in other:
        known = fields.get(field.name)
        fields[field.name] = field if known is None else known.with_type(extend_type(known.type, field.type))
    return list(fields.values())


def fits(kind: pa.DataType, target: pa.DataType) -> bool:
    """Whether every value of `kind` is one of `target`."""
    merged = merge_types(kind, target)
    return merged is not None and bool(merged.equals(target))


def merge_fields(one: Iterable[pa.Field], other: Iterable[pa.Field]) -> list[pa.Field] | pa.Field:
    """The union of two field lists in order of appearance; the field of `other` that has no common type, if one."""
    merged = {field.name: field for field in one}
    for field in other:
        known = merged.get(field.name)
        if known is None:
            merged[field.name] = field
            continue
        common = merge_types(known.type, field.type)
        if common is None:
            return field
        merged[field.name] = known.with_type(common)
    return list(merged.values())


def conform(array: pa.Array, target: pa.DataType) -> pa.Array:
    """The same values in a type that `merge_types` found for them."""
    if array.type.equals(target):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), target)
    if pa.types.is_struct(target):
        return _conform_struct(array, target)
    if is_list(target):
        return _conform_list(array, target)
    if pa.types.is_timestamp(array.type) and pa.types.is_string(target):
        return pc.strftime(array, "%Y-%m-%dT%H:%M:%S%z" if array.type.tz else "%Y-%m-%dT%H:%M:%S")
    return pc.cast(array, target)


def conform_batch(batch: pa.RecordBatch, schema: pa.Schema) -> tuple[pa.RecordBatch, dict[int, str]]:
    """The columns of `schema`, in its types; a column the batch lacks is null.

    A row with a value that its type cannot hold is null throughout; the second result tells why, by offset.
    """
    misfits: dict[int, str] = {}
    columns = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        given = batch.column(index) if index >= 0 else pa.nulls(batch.num_rows, field.type)
        column, unfit = _conform_column(given, field)
        columns.append(column)
        misfits = {**unfit, **misfits}
    return blank(record_batch(columns, schema, batch.num_rows), misfits), misfits


def blank(batch: pa.RecordBatch, offsets: Collection[int]) -> pa.RecordBatch:
    """The batch with nothing but nulls in some rows."""
    if not offsets or not batch.num_columns:
        return batch
    return batch.take(pa.array([None if offset in offsets else offset for offset in range(batch.num_rows)], pa.int64()))


def _conform_column(array: pa.Array, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    try:
        return conform(array, field.type), {}
    except pa.ArrowException:
        parts = [_conform_value(array.slice(at, 1), field) for at in range(len(array))]
    return pa.concat_arrays([part for part, _ in parts]), {at: text for at, (_, text) in enumerate(parts) if text}


def _conform_value(one: pa.Array, field: pa.Field) -> tuple[pa.Array, str | None]:
    try:
        return conform(one, field.type), None
    except pa.ArrowException:
        shown = str(one[0])[:80]
        return pa.nulls(1, field.type), f"column {field.name!r} is {field.type}, which cannot hold {shown}"


def record_batch(columns: list[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    """A record batch that keeps its number of rows even without a column."""
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([]))).replace_schema_metadata(
        schema.metadata
    )


def null_batch(num_rows: int, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of nulls, for rows that could not be read."""
    return record_batch([pa.nulls(num_rows, field.type) for field in schema], schema, num_rows)


def is_list(kind: pa.DataType) -> bool:
    """Lists of either offset width."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with every top-level field nullable: a row that cannot be read has nulls."""
    return pa.schema([field.with_nullable(True) for field in schema], schema.metadata)


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type with plain strings and binaries for views, which Arrow cannot pick rows from."""
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(without_views(field.type)) for field in kind])
    if is_list(kind):
        item = kind.value_field.with_type(without_views(kind.value_type))
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(without_views(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(without_views(kind.key_type), without_views(kind.item_type), kind.keys_sorted)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, without_views(kind.value_type), kind.ordered)
    return kind


def schema_without_views(schema: pa.Schema) -> pa.Schema:
    """As `without_views`, for every column."""
    fields = [field.with_type(without_views(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def batch_without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """As `without_views`, for the values too. Raises pa.ArrowException for values that cannot be converted."""
    schema = schema_without_views(batch.schema)
    if schema.equals(batch.schema):
        return batch
    columns = [conform(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return record_batch(columns, schema, batch.num_rows)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _merge_numbers(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if pa.types.is_floating(one) or pa.types.is_floating(other):
        return pa.float64()
    if pa.types.is_signed_integer(one) == pa.types.is_signed_integer(other):
        return one if one.bit_width >= other.bit_width else other
    unsigned = other if pa.types.is_signed_integer(one) else one
    signed = one if unsigned is other else other
    return _SIGNED.get(max(unsigned.bit_width * 2, signed.bit_width))


def _merge_nested(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = merge_fields(one, other)
        return pa.struct(fields) if isinstance(fields, list) else None
    lists = [one, other]
    if not all(map(is_list, lists)):
        return None
    item = merge_types(one.value_type, other.value_type)
    if item is None:
        return None
    field = one.value_field.with_type(item)
    return pa.large_list(field) if any(pa.types.is_large_list(kind) for kind in lists) else pa.list_(field)


def _conform_struct(array: pa.StructArray, target: pa.StructType) -> pa.Array:
    children = []
    for field in target:
        index = array.type.get_field_index(field.name)
        child = pa.nulls(len(array), field.type) if index < 0 else conform(_child(array, index), field.type)
        children.append(child)
    if not children:
        return array
    return pa.StructArray.from_arrays(children, fields=list(target), mask=array.is_null())


def _child(array: pa.StructArray, index: int) -> pa.Array:
    return array.field(index)


def _conform_list(array: pa.Array, target: pa.DataType) -> pa.Array:
    values = conform(array.flatten(), target.value_type)
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    ends = pc.cumulative_sum(lengths)
    offset_type = pa.int64() if pa.types.is_large_list(target) else pa.int32()
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(offset_type)
    kind = pa.LargeListArray if pa.types.is_large_list(target) else pa.ListArray
    return kind.from_arrays(offsets, values, type=target, mask=array.is_null())
