"""What an output cannot hold is found with made-up rows, and named with its cure."""

from typing import Any

import pyarrow as pa
import pytest

from batchgen.pipeline.result import result_schema
from batchgen.pipeline.sink import OutputError
from batchgen.pipeline.trial import is_plain, require_writable, sample_array

RESULTS = list(result_schema(2, True))
UNION = pa.dense_union([pa.field("a", pa.int64())])


def nested(levels: int) -> pa.DataType:
    kind = pa.int64()
    for _ in range(levels):
        kind = pa.list_(kind)
    return kind


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
@pytest.mark.parametrize(
    "kind",
    [pa.month_day_nano_interval(), pa.run_end_encoded(pa.int32(), pa.int64()), UNION],
    ids=str,
)  # fmt: skip
def test_types_without_a_form_are_refused_by_name(form: Any, kind: pa.DataType) -> None:
    schema = pa.schema([("fine", pa.string()), ("odd", kind), *RESULTS])
    with pytest.raises(OutputError, match=rf"{form} cannot hold column 'odd'.*output\.columns"):
        require_writable(form, schema)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_columns_nested_too_deep_are_refused_by_name(form: Any) -> None:
    with pytest.raises(OutputError, match="cannot hold column 'deep'"):
        require_writable(form, pa.schema([("deep", nested(100)), *RESULTS]))


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_what_can_be_written_passes(form: Any) -> None:
    kinds = [
        pa.string(), pa.large_string(), pa.binary(), pa.binary(3), pa.bool_(), pa.uint8(), pa.float32(), pa.null(),
        pa.decimal128(10, 2), pa.date32(), pa.timestamp("us", "UTC"), pa.time64("us"), pa.duration("ms"),
        pa.dictionary(pa.int8(), pa.string()), pa.struct([("a", pa.list_(pa.int16()))]), pa.struct([]),
        pa.large_list(pa.string()), pa.list_(pa.float32(), 2),
    ]  # fmt: skip
    kinds = [kind for kind in kinds if not (form == "parquet" and kind == pa.struct([]))]
    require_writable(form, pa.schema([*((f"c{at}", kind) for at, kind in enumerate(kinds)), *RESULTS]))
    require_writable(form, pa.schema(RESULTS))


def test_samples_are_values() -> None:
    values = pa.map_(pa.string(), pa.large_binary())
    kind = pa.struct([("m", values), ("v", pa.list_view(pa.date64())), ("f", pa.float16())])
    array = sample_array(kind)
    array.validate(full=True)
    assert array.to_pylist()[0]["m"] == [("", b"")]


def test_plain_types() -> None:
    assert is_plain(pa.struct([("a", nested(3))]))
    assert not is_plain(nested(20))
    assert not is_plain(pa.map_(pa.string(), pa.int64()))
