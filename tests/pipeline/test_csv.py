"""CSV input: what RFC 4180 files hold, row by row, whatever is wrong with one of them."""

import bz2
import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import errors_of, rows_of, source_of

from batchgen.pipeline import records
from batchgen.pipeline.delimited import open_delimited
from batchgen.pipeline.rows import InputError, InputFile

HEADER = "id,text\n"


def written(folder: Path, content: str | bytes, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder: Path, content: str | bytes, name: str = "rows.csv", **more: Any) -> list[dict[str, Any]]:
    written(folder, content, name)
    return rows_of(source_of(folder, name, **more))


def test_quotes_line_feeds_nulls_and_blank_lines(tmp_path: Path) -> None:
    rows = read(tmp_path, 'a,b\r\n"x, y","say ""hi""\nthere"\r\n\r\n,""\r\n5" pipe,z')
    assert rows == [
        {"a": "x, y", "b": 'say "hi"\nthere'},
        {"a": None, "b": ""},
        {"a": '5" pipe', "b": "z"},
    ]


def test_a_mark_in_front_changes_nothing(tmp_path: Path) -> None:
    content = '"id",text\n1,ä\n'.encode()
    assert read(tmp_path, content) == [{"id": 1, "text": "ä"}]
    assert read(tmp_path, b"\xef\xbb\xbf" + content, "marked.csv") == [{"id": 1, "text": "ä"}]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "", "-3"], pa.int64()),
        (["1", "2.5", "1e3"], pa.float64()),
        (["1", "NaN", "3"], pa.float64()),
        (["true", "False"], pa.bool_()),
        (["1", "x"], pa.string()),
        (["007", "8"], pa.string()),
        (["12345678901234567890"], pa.string()),
        (["true", "1"], pa.string()),
        (["", ""], pa.null()),
    ],
)
def test_a_column_is_the_narrowest_type_of_all_its_values(tmp_path: Path, values: list[str], kind: pa.DataType) -> None:
    written(tmp_path, "a,b\n" + "".join(f"{value},x\n" for value in values))
    source = source_of(tmp_path, "rows.csv")
    assert source.schema.field("a").type == kind
    assert not errors_of(source)
    assert len(rows_of(source)) == len(values)


def test_a_late_text_makes_the_column_text_in_all_files(tmp_path: Path) -> None:
    written(tmp_path, "id\n" + "1\n" * 10_000 + "late\n", "a.csv")
    written(tmp_path, "id,more\n2,3\n", "b.csv")
    source = source_of(tmp_path, "*.csv")
    rows = rows_of(source)
    assert rows[0] == {"id": "1", "more": None}
    assert [row["id"] for row in rows[-2:]] == ["late", "2"]
    assert not errors_of(source)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"2", "1 fields, the header has 2"),
        (b"2,a,b", "3 fields, the header has 2"),
        (b"2,\xff", "not valid UTF-8 at byte 3"),
        (b'2,"never closed', "a quoted field is not closed"),
        (b'2,"a"b', "goes on behind its quotes"),
    ],
)
def test_a_bad_record_keeps_its_place(tmp_path: Path, line: bytes, reason: str) -> None:
    written(tmp_path, b'id,text\n1,a\n%b\n3,"c"\n4,d\n' % line)
    for block_bytes in (7, 1 << 20):
        reader = open_delimited(InputFile(tmp_path / "rows.csv", "rows.csv", "csv"), block_bytes=block_bytes)
        [rows] = [pa.Table.from_batches([batch.columns for batch in reader.read(0, 4, reader.schema)]).to_pylist()]
        assert rows[0] == {"id": 1, "text": "a"}
        assert rows[1] == {"id": None, "text": None}
        assert rows[2:] == [{"id": 3, "text": "c"}, {"id": 4, "text": "d"}]
    [(at, message)] = errors_of(source_of(tmp_path, "rows.csv")).items()
    assert at == 1
    assert message.startswith("rows.csv line 3: ")
    assert reason in message


def test_a_quote_that_never_closes_is_given_up_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    path = written(tmp_path, HEADER + '1,"open\n' + "2,x\n" * 1000)
    reader = open_delimited(InputFile(path, "rows.csv", "csv"), block_bytes=64)
    assert reader.num_rows == 1001
    assert reader.place(1000) == "line 1002"


def test_a_five_megabyte_field_in_small_blocks(tmp_path: Path) -> None:
    long = "line\n" * 1_000_000
    path = written(tmp_path, HEADER + f'1,"{long}"\n2,b\n')
    reader = open_delimited(InputFile(path, "rows.csv", "csv"), block_bytes=1 << 16)
    [last] = reader.read(1, 2, reader.schema)
    assert last.columns.to_pylist() == [{"id": 2, "text": "b"}]
    assert reader.place(1) == "line 1000003"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\r1,2\r3,4\r", "line 1: the header holds a carriage return without a line feed"),
        ("a,,b\n1,2,3\n", "column 2 of the header has no name"),
        ("a,a\n1,2\n", "holds the column 'a' twice"),
        ('a,"b\n1,2\n', "line 1: the header cannot be read"),
        (b"a,\xff\n", "line 1: the header cannot be read"),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    written(tmp_path, content)
    with pytest.raises(InputError, match=message):
        source_of(tmp_path, "rows.csv")


def test_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path, HEADER) == []
    assert source_of(tmp_path, "rows.csv").schema.names == ["id", "text"]
    assert read(tmp_path, "", "empty.csv") == []


def test_tabs_and_compression(tmp_path: Path) -> None:
    rows = [{"id": 1, "text": "a,b"}, {"id": 2, "text": "c"}]
    plain = b'id,text\n1,"a,b"\n2,c\n'
    assert read(tmp_path, "id\ttext\n1\ta,b\n2\tc\n", "rows.tsv") == rows
    assert read(tmp_path, gzip.compress(plain), "rows.csv.gz") == rows
    assert read(tmp_path, gzip.compress(plain[:12]) + gzip.compress(plain[12:]), "members.csv.gz") == rows
    assert read(tmp_path, bz2.compress(plain), "rows.csv.bz2") == rows
    assert read(tmp_path, pa.Codec("zstd").compress(plain, asbytes=True), "rows.csv.zst") == rows
    lines = b'{"id": 1}\n{"id": 2'
    assert read(tmp_path, gzip.compress(lines), "rows.jsonl.gz") == [{"id": 1}]


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    written(tmp_path, gzip.compress(b"id\n" + b"1\n" * 100_000)[:-50], "rows.csv.gz")
    with pytest.raises(InputError, match=r"rows\.csv\.gz: cannot be read"):
        source_of(tmp_path, "rows.csv.gz")


def test_settled_types_stand(tmp_path: Path) -> None:
    from batchgen.pipeline.config import InputSettings
    from batchgen.pipeline.source import open_source

    written(tmp_path, "id\n1\nx\n3\n")
    known = pa.schema([("id", pa.int64())])
    source = open_source(InputSettings(path="rows.csv"), tmp_path, known_schema=known)
    assert [row["id"] for row in rows_of(source)] == [1, None, 3]
    assert errors_of(source, []) == {1: "rows.csv line 3: column 'id' is int64, which cannot hold x"}


TEXT = st.text(st.characters(exclude_characters="\r\0", codec="utf-8"), max_size=8)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(TEXT, TEXT), max_size=20), block_bytes=st.integers(1, 40), start=st.integers(0, 20))
def test_what_the_standard_writer_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], block_bytes: int, start: int
) -> None:
    content = io.StringIO()
    writer = csv.writer(content, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([("a", "b"), *rows])
    path = written(tmp_path_factory.mktemp("csv"), content.getvalue())
    reader = open_delimited(InputFile(path, "rows.csv", "csv"), block_bytes=block_bytes)
    assert reader.num_rows == len(rows)
    schema = pa.schema([("a", pa.string()), ("b", pa.string())])
    found = [row for batch in reader.read(start, len(rows), schema) for row in batch.columns.to_pylist()]
    assert found == [{"a": one, "b": two} for one, two in rows[start:]]
