"""Input that grows: positions of known rows never shift, whatever is added and in whatever order it sorts."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import errors_of, rows_of, write_parquet

from batchgen.pipeline.config import InputSettings
from batchgen.pipeline.rows import FileIdentity, InputError, Source
from batchgen.pipeline.source import open_source


def read(base: Path, known: list[FileIdentity] | None = None, limit: int | None = None) -> Source:
    return open_source(InputSettings(path="*", limit=limit), base, known or [])


def values(source: Source) -> list[str]:
    return [row["x"] for row in rows_of(source)]


def append(path: Path, *texts: str) -> None:
    with path.open("a") as file:
        file.writelines(f'{{"x": "{text}"}}\n' for text in texts)


def test_new_files_come_after_known_ones(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", {"x": ["b0", "b1"]})
    known = read(tmp_path).files
    write_parquet(tmp_path / "a.parquet", {"x": ["a0"]})
    assert values(read(tmp_path)) == ["a0", "b0", "b1"]
    assert values(read(tmp_path, known)) == ["b0", "b1", "a0"]


def test_appended_rows_come_after_all_known_rows(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", "a0", "a1")
    append(tmp_path / "b.jsonl", "b0")
    known = read(tmp_path).files
    append(tmp_path / "a.jsonl", "a2")
    grown = read(tmp_path, known)
    assert values(grown) == ["a0", "a1", "b0", "a2"]
    assert [(file.path, file.rows) for file in grown.files] == [("a.jsonl", 2), ("b.jsonl", 1), ("a.jsonl", 1)]
    append(tmp_path / "b.jsonl", "b1")
    append(tmp_path / "c.jsonl", "c0")
    append(tmp_path / "a.jsonl", "a3")
    again = read(tmp_path, grown.files)
    assert values(again) == ["a0", "a1", "b0", "a2", "a3", "b1", "c0"]
    assert again.place(4) == "a.jsonl line 4"
    assert values(read(tmp_path, again.files)) == values(again)
    assert read(tmp_path, again.files).files == again.files


def test_a_last_line_without_end_may_be_ended_but_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": "a0"}')
    known = read(tmp_path).files
    path.write_text('{"x": "a0"}\n{"x": "a1"}\n')
    assert values(read(tmp_path, known)) == ["a0", "a1"]
    path.write_text('{"x": "a0"} {"x": "a1"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl: changed"):
        read(tmp_path, known)


def test_a_limit_raised_later_shifts_nothing(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", "a0", "a1", "a2")
    append(tmp_path / "b.jsonl", "b0")
    few = read(tmp_path, limit=2)
    assert values(few) == ["a0", "a1"]
    assert values(read(tmp_path, few.files)) == ["a0", "a1", "a2", "b0"]
    everything = read(tmp_path)
    assert values(read(tmp_path, everything.files, limit=2)) == ["a0", "a1"]


@pytest.mark.parametrize("change", ["gone", "rewritten", "shorter", "touched", "parquet"])
def test_changed_known_files_are_refused_by_name(tmp_path: Path, change: str) -> None:
    path = tmp_path / ("a.parquet" if change == "parquet" else "a.jsonl")
    append(tmp_path / "b.jsonl", "b0")
    if change == "parquet":
        write_parquet(path, {"x": ["a0"]})
    else:
        append(path, "a0", "a1")
    known = read(tmp_path).files
    if change == "gone":
        path.unlink()
    elif change == "rewritten":
        path.write_text('{"x": "A0"}\n{"x": "a1"}\n{"x": "a2"}\n')
    elif change == "shorter":
        path.write_text('{"x": "a0"}\n')
    elif change == "touched":
        os.utime(path, ns=(1, 1))
    else:
        write_parquet(path, {"x": ["a0", "a1"]})
    with pytest.raises(InputError, match=rf"{path.name}: .*--fresh") as caught:
        read(tmp_path, known)
    assert caught.value.exit_code == 2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), max_size=3), min_size=1, max_size=5))
def test_any_history_of_growth_keeps_positions(
    tmp_path_factory: pytest.TempPathFactory, history: list[list[tuple[str, int]]]
) -> None:
    base = tmp_path_factory.mktemp("growth")
    append(base / "b.jsonl", "start")
    known: list[FileIdentity] = []
    before: list[str] = []
    count = 0
    for additions in history:
        for name, rows in additions:
            append(base / f"{name}.jsonl", *(f"{name}{count + row}" for row in range(rows)))
            count += rows
        source = read(base, known)
        now = values(source)
        assert now[: len(before)] == before
        assert len(now) == len(set(now)) == count + 1
        known, before = source.files, now


def lines(path: Path, *rows: object) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def grow(base: Path, before: Source, **more: Any) -> Source:
    return open_source(InputSettings(path="*"), base, before.files, before.schema, **more)


def test_a_settled_type_stays_when_other_values_become_the_majority(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines(path, *({"id": number} for number in range(3)))
    before = read(tmp_path)
    lines(path, *({"id": f"s{number}", "more": [1]} for number in range(5)), {"id": 3}, {"id": 0.5})
    grown = grow(tmp_path, before)
    assert grown.schema.field("id").type == pa.int64()
    assert sorted(errors_of(grown)) == [3, 4, 5, 6, 7, 9]
    assert "line 4: column 'id' is int64, here a string" in errors_of(grown)[3]
    assert [row["id"] for row in rows_of(grown)][:3] == [0, 1, 2]
    assert rows_of(grown)[8] == {"id": 3, "more": None}
    assert grow(tmp_path, grown).schema.equals(grown.schema)


def test_what_was_not_known_of_a_type_is_settled_later(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines(path, {"x": None, "l": [], "s": {"a": 1}})
    before = read(tmp_path)
    rows = [{"x": "t", "l": ["u"], "s": {"a": 2, "b": "c"}}, {"x": "v", "l": ["w"], "s": {"a": 3, "b": "d"}}]
    lines(path, *rows)
    grown = grow(tmp_path, before)
    assert errors_of(grown) == {}
    assert rows_of(grown)[1:] == rows


def test_numbers_of_a_new_file_do_not_change_those_that_were_settled(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"k": [1, 2**53 + 1]})
    before = read(tmp_path)
    write_parquet(tmp_path / "b.parquet", {"k": [2.0, 0.5]})
    grown = grow(tmp_path, before)
    assert [row["k"] for row in rows_of(grown)] == [1, 2**53 + 1, 2, None]
    assert errors_of(grown) == {3: "b.parquet row 2: column 'k' is int64, which cannot hold 0.5"}


def test_a_new_file_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"k": [1]})
    before = read(tmp_path)
    write_parquet(tmp_path / "b.parquet", {"k": ["text"]})
    with pytest.raises(InputError, match=r"b\.parquet: column 'k' is string, but int64 in files before it"):
        grow(tmp_path, before)


def test_a_column_that_nobody_uses_spoils_no_row(tmp_path: Path) -> None:
    lines(
        tmp_path / "a.jsonl", {"x": "a", "id": 1, "z": 1}, {"x": "b", "id": "odd", "z": 2}, {"x": "c", "id": 3, "z": {}}
    )
    settings = InputSettings(path="*")
    assert sorted(errors_of(open_source(settings, tmp_path), ["x"])) == [1, 2]
    assert errors_of(open_source(settings, tmp_path, relevant=frozenset({"x"})), ["x"]) == {}
    assert sorted(errors_of(open_source(settings, tmp_path, relevant=frozenset({"x", "z"})), ["x"])) == [2]
    assert sorted(errors_of(open_source(settings, tmp_path, relevant=frozenset({"x"})), ["id"])) == [1]


def test_nan_in_a_column_of_settled_whole_numbers_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n')
    known = read(tmp_path)
    path.write_text('{"x": 1}\n{"x": NaN}\n')
    grown = open_source(InputSettings(path="*.jsonl"), tmp_path, known.files, known.schema)
    assert rows_of(grown) == [{"x": 1}, {"x": None}]
    assert errors_of(grown) == {}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("cut", [5, 9, 12])
def test_a_line_still_being_written_is_no_row_yet(tmp_path: Path, cut: int, mark: bytes) -> None:
    path, line = tmp_path / "a.jsonl", mark + '{"x": "aäb"}'.encode()
    path.write_bytes(line[:cut])
    first = read(tmp_path)
    assert (first.num_rows, list(first.unfinished)) == (0, ["a.jsonl line 1"])
    path.write_bytes(line + b"\n" + line[len(mark) :][:cut])
    known = read(tmp_path, first.files)
    assert (values(known), list(known.unfinished)) == (["aäb"], ["a.jsonl line 2"])
    again = read(tmp_path, known.files)
    assert again.files == known.files
    path.write_bytes(line + b"\n" + line[len(mark) :])
    whole = read(tmp_path, known.files)
    assert (values(whole), list(whole.unfinished)) == (["aäb", "aäb"], [])
    path.write_bytes(line.replace(b"b", b"c") + b"\n" + line)
    with pytest.raises(InputError, match="changed"):
        read(tmp_path, known.files)


def test_a_bad_line_that_has_ended_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": "a"}\n{"x": \n')
    source = read(tmp_path)
    assert (source.num_rows, list(source.unfinished), list(errors_of(source))) == (2, [], [1])
