"""Types of several files brought together: symmetric, and values stay as they are."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.pipeline.schema import conform, merge_types

VALUES = st.recursive(
    st.none() | st.integers(-5, 5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


def without_nulls(value: Any) -> Any:
    """Absent and null fields look the same."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def array_or_none(values: list[Any]) -> pa.Array | None:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


@given(st.lists(VALUES, min_size=1, max_size=4), st.lists(VALUES, min_size=1, max_size=4), st.integers(0, 3))
def test_values_survive_in_the_common_type(one: list[Any], other: list[Any], offset: int) -> None:
    arrays = [array_or_none(one), array_or_none(other)]
    if arrays[0] is None or arrays[1] is None:
        return
    merged = merge_types(arrays[0].type, arrays[1].type)
    if merged is None:
        assert merge_types(arrays[1].type, arrays[0].type) is None
        return
    for array in arrays:
        part = array.slice(offset)
        result = conform(part, merged)
        result.validate(full=True)
        assert result.type.equals(merged)
        assert [without_nulls(value) for value in result.to_pylist()] == [
            without_nulls(value) for value in part.to_pylist()
        ]


def test_a_null_struct_stays_null_and_one_of_nulls_does_not_become_one() -> None:
    array = pa.array([None, {"a": None}, {"a": 1}])
    result = conform(array, pa.struct([("a", pa.float64()), ("b", pa.string())]))
    assert result.to_pylist() == [None, {"a": None, "b": None}, {"a": 1.0, "b": None}]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.int8(), pa.int32(), pa.int32()),
        (pa.int32(), pa.uint32(), pa.int64()),
        (pa.int64(), pa.uint64(), None),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.null(), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.bool_(), pa.int8(), None),
        (pa.string(), pa.int8(), None),
        (pa.list_(pa.null()), pa.large_list(pa.string()), pa.large_list(pa.string())),
        (pa.timestamp("s"), pa.timestamp("s", "UTC"), None),
    ],
)
def test_common_types(one: pa.DataType, other: pa.DataType, expected: pa.DataType | None) -> None:
    assert merge_types(one, other) == expected
    assert merge_types(other, one) == expected
