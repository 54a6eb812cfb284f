"""JSON lines: every line a row or an error at its position, and one schema settled over all of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import errors_of, rows_of, source_of

from batchgen.pipeline.jsonl import JsonlReader, open_jsonl
from batchgen.pipeline.rows import InputError, InputFile


def reader_of(path: Path, block_bytes: int, num_rows: int | None = None) -> JsonlReader:
    return open_jsonl(InputFile(path, path.name, "jsonl"), num_rows, block_bytes)


def write(tmp_path: Path, *lines: str | bytes, name: str = "0.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return path


def test_ten_thousand_nulls_then_a_string(tmp_path: Path) -> None:
    write(tmp_path, *['{"x": null}'] * 10_000, '{"x": "late"}')
    source = source_of(tmp_path, "0.jsonl")
    assert source.schema.field("x").type == pa.string()
    rows = rows_of(source)
    assert (len(rows), rows[0], rows[-1]) == (10_001, {"x": None}, {"x": "late"})


def test_empty_lists_then_structs(tmp_path: Path) -> None:
    write(tmp_path, '{"x": []}', '{"x": [{"a": 1}]}', '{"x": [{"b": "t"}]}')
    assert rows_of(source_of(tmp_path, "0.jsonl"))[1:] == [{"x": [{"a": 1, "b": None}]}, {"x": [{"a": None, "b": "t"}]}]


def test_mixed_types_are_an_error_row_with_file_and_line(tmp_path: Path) -> None:
    write(tmp_path, '{"id": 1, "t": "a"}', '{"id": "Nan", "t": "b"}', '{"id": 3, "t": "c"}')
    source = source_of(tmp_path, "0.jsonl")
    expected = {1: "0.jsonl line 2: column 'id' is int64, here a string: \"Nan\""}
    assert errors_of(source) == expected
    assert errors_of(source, ["t"]) == expected  # whichever columns are read
    assert rows_of(source) == [{"id": 1, "t": "a"}, {"id": None, "t": None}, {"id": 3, "t": "c"}]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"t": "open', "not valid JSON: Unterminated string"),
        (b'{"t": "\xff"}', "not valid UTF-8 at byte 8"),
        ("[1, 2]", "not a JSON object but a list"),
        ("7", "not a JSON object but a number"),
        ('{"t": "a"} {"t": "b"}', "not valid JSON: Extra data"),
        ("[" * 100_000, "nested|recursion|RecursionError"),
        ('{"t": "x", "n": ' + "9" * 5000 + "}", "not readable JSON"),
    ],
)
def test_a_bad_line_keeps_its_place(tmp_path: Path, line: str | bytes, expected: str) -> None:
    write(tmp_path, '{"t": "1"}', '{"t": "2"}', line, '{"t": "4"}', '{"t": "5"}')
    source = source_of(tmp_path, "0.jsonl")
    [(position, message)] = errors_of(source).items()
    assert position == 2
    assert message.startswith("0.jsonl line 3: ")
    assert any(part in message for part in expected.split("|"))
    assert [row["t"] for row in rows_of(source)] == ["1", "2", None, "4", "5"]


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, '{"t": "ä"}', '{"t": "b"}', name="plain.jsonl")
    write(tmp_path, b"\xef\xbb\xbf" + '{"t": "ä"}'.encode(), '{"t": "b"}', name="marked.jsonl")
    assert rows_of(source_of(tmp_path, "plain.jsonl")) == rows_of(source_of(tmp_path, "marked.jsonl"))


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    write(tmp_path, "", '{"t": 1}\r', "  \t", '{"t": 2}', "broken")
    source = source_of(tmp_path, "0.jsonl")
    assert [row["t"] for row in rows_of(source)] == [1, 2, None]
    assert source.place(1) == "0.jsonl line 4"
    assert "line 5" in errors_of(source)[2]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    write(tmp_path, '{"t": "a\u2028b\u0085c"}', '{"t": "d"}')
    assert [row["t"] for row in rows_of(source_of(tmp_path, "0.jsonl"))] == ["a\u2028b\u0085c", "d"]


def test_a_line_of_five_megabytes(tmp_path: Path) -> None:
    long = "x" * (5 << 20)
    path = write(tmp_path, '{"t": "a"}', json.dumps({"t": long}), '{"t": "b"}')
    reader = reader_of(path, 1 << 20)
    texts = [text for batch in reader.read(0, 3, reader.schema) for text in batch.columns.column(0).to_pylist()]
    assert texts == ["a", long, "b"]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_blocks_do_not_show(tmp_path: Path, block_bytes: int) -> None:
    rows = [{"n": number, "t": "é" * (number % 17)} for number in range(60)]
    path = tmp_path / "0.jsonl"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    reader = reader_of(path, block_bytes)
    assert reader.num_rows == 60
    for start, stop in ((0, 60), (31, 33), (59, 60)):
        batches = list(reader.read(start, stop, reader.schema))
        assert batches[0].start == start
        assert [row for batch in batches for row in batch.columns.to_pylist()] == rows[start:stop]
        assert reader.place(start) == f"line {2 * start + 1}"


def test_lone_surrogates_are_replaced_and_counted(tmp_path: Path) -> None:
    write(tmp_path, r'{"t": "a\udc00b", "l": ["\ud800"], "fine": "\ud83d\ude00"}', '{"t": "ok"}')
    source = source_of(tmp_path, "0.jsonl")
    assert rows_of(source)[0] == {"t": "a\ufffdb", "l": ["\ufffd"], "fine": "\U0001f600"}
    assert source.replaced_surrogates == 2


def test_numbers_beyond_63_bits_and_floats(tmp_path: Path) -> None:
    write(tmp_path, '{"u": 18446744073709551615, "f": 1}', '{"u": 1, "f": 0.5}', '{"u": -1, "f": 2}')
    source = source_of(tmp_path, "0.jsonl")
    assert source.schema.field("u").type == pa.uint64()
    assert list(errors_of(source)) == [2]
    assert [row["f"] for row in rows_of(source)][:2] == [1.0, 0.5]


def test_text_that_looks_like_a_time_stays_text(tmp_path: Path) -> None:
    write(tmp_path, '{"t": "2020-01-01T00:00:00"}', '{"t": "no time"}')
    assert rows_of(source_of(tmp_path, "0.jsonl"))[0] == {"t": "2020-01-01T00:00:00"}


def test_the_majority_decides_a_column(tmp_path: Path) -> None:
    write(tmp_path, '{"x": "odd one"}', *[f'{{"x": {number}}}' for number in range(5)], '{"x": true}')
    source = source_of(tmp_path, "0.jsonl")
    assert source.schema.field("x").type == pa.int64()
    assert list(errors_of(source)) == [0, 6]


@pytest.mark.parametrize("others", ["1", '{"a": 1}', "null", "[]"])
@pytest.mark.parametrize("ends", [("[", "]"), ('{"b":', "}")], ids=["lists", "objects"])
def test_rows_nested_too_deep_are_their_own_error(tmp_path: Path, others: str, ends: tuple[str, str]) -> None:
    def nested(levels: int) -> str:
        return f'{{"x": {ends[0] * levels}1{ends[1] * levels}}}'

    write(tmp_path, *[f'{{"x": {others}}}'] * 3, nested(100), nested(63))
    source = source_of(tmp_path, "0.jsonl")
    message = "column 'x' is nested deeper than 62 levels"
    assert errors_of(source) == {3: f"0.jsonl line 4: {message}", 4: f"0.jsonl line 5: {message}"}
    write(tmp_path, nested(62))
    deep = source_of(tmp_path, "0.jsonl")
    assert errors_of(deep) == {}
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, deep.schema) as writer:
        writer.write_batch(next(deep.batches()).columns)


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("other", ['"b"', "true", "[1]", '{"a": "c"}'])
def test_nan_among_what_is_no_number_is_null(tmp_path: Path, first: int, other: str) -> None:
    lines = [f'{{"t": {other}}}', *['{"t": NaN}'] * 3]
    write(tmp_path, *lines[-first:], *lines[: 4 - first])
    source = source_of(tmp_path, "0.jsonl")
    assert errors_of(source) == {}
    values = [row["t"] for row in rows_of(source)]
    assert [value for value in values if value is not None] == [json.loads(other)]


@pytest.mark.parametrize("form", ["{}", "[{}]", '{{"a": {}}}'])
def test_a_boolean_among_numbers_does_not_become_one(tmp_path: Path, form: str) -> None:
    write(tmp_path, *[f'{{"x": {form.format(value)}}}' for value in ("1.5", "true", "2", "false")])
    source = source_of(tmp_path, "0.jsonl")
    assert list(errors_of(source)) == [1, 3]
    assert [row["x"] for row in rows_of(source)] == [
        json.loads(form.format(1.5)),
        None,
        json.loads(form.format(2)),
        None,
    ]
    write(tmp_path, '{"x": [0.5, true]}', '{"x": [0.5]}')
    assert list(errors_of(source_of(tmp_path, "0.jsonl"))) == [0]


def test_whole_numbers_among_floats_are_equal_or_their_rows_error(tmp_path: Path) -> None:
    numbers = [2**53, 2**53 + 1, 2**60, 2**63 - 1, 2**70, -(2**64), 10**400, 7]
    write(tmp_path, *['{"x": 0.5}'] * 9, *[f'{{"x": {number}}}' for number in numbers])
    source = source_of(tmp_path, "0.jsonl")
    errors = errors_of(source)
    assert list(errors) == [10, 12, 15]
    assert errors[10] == "0.jsonl line 11: column 'x' is double, which cannot hold 9007199254740993 exactly"
    read = [row["x"] for row in rows_of(source)][9:]
    assert read == [2**53, None, 2**60, None, 2**70, -(2**64), None, 7]


def test_nan_among_numbers_is_a_number(tmp_path: Path) -> None:
    write(tmp_path, '{"a": NaN, "b": NaN, "c": 1}', '{"a": 1, "b": NaN, "c": 2}', '{"a": 2.5}')
    source = source_of(tmp_path, "0.jsonl")
    assert [str(field.type) for field in source.schema] == ["double", "double", "int64"]
    assert [repr(row["a"]) for row in rows_of(source)] == ["nan", "1.0", "2.5"]
    assert errors_of(source) == {}


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_bytes(b"")
    source = source_of(tmp_path, "0.jsonl")
    assert (source.num_rows, rows_of(source), [file.rows for file in source.files]) == (0, [], [0])


def test_one_json_array_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "[", '{"t": 1},', '{"t": 2}', "]")
    with pytest.raises(InputError, match=r"0\.jsonl: is one JSON array") as caught:
        source_of(tmp_path, "0.jsonl")
    assert caught.value.exit_code == 2


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, *[f'{{"x": {number}}}' for number in range(100)], '{"late": 1}')
    reader = reader_of(path, 64, num_rows=30)
    assert (reader.num_rows, reader.schema.names) == (30, ["x"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2), max_size=12), st.sampled_from([16, 4096]))
def test_any_rows_in_are_rows_out(tmp_path_factory: Any, rows: list[dict[str, Any]], block_bytes: int) -> None:
    path = tmp_path_factory.mktemp("rows") / "0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = reader_of(path, block_bytes)
    assert reader.num_rows == len(rows)
    batches = list(reader.read(0, len(rows), reader.schema))
    read = [row for batch in batches for row in batch.columns.to_pylist()]
    errors = {batch.start + offset for batch in batches for offset in batch.errors}
    assert len(read) == len(rows)
    for position, row in enumerate(rows):
        for name, value in row.items():
            if position not in errors and isinstance(value, (str, bool)):
                assert read[position][name] == value
