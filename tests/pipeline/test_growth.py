"""Input that grows: positions of known rows never shift, whatever is added and in whatever order it sorts."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import rows_of, write_parquet

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
