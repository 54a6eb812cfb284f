"""Reading: files in order, one row group at a time, damaged parts as rows with errors, positions that stay."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import errors_of, rows_of, source_of, write_parquet

from batchgen.pipeline.config import InputSettings
from batchgen.pipeline.growth import Run
from batchgen.pipeline.rows import FileIdentity, InputError
from batchgen.pipeline.source import FileSource, sample_schema


def test_globs_and_directories_sort_by_path_and_lists_keep_their_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_parquet(tmp_path / f"{name}.parquet", {"x": [name]})
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "__batchgen__").mkdir()
    write_parquet(tmp_path / "__batchgen__" / "z.parquet", {"x": ["sidecar"]})
    assert [row["x"] for row in rows_of(source_of(tmp_path, "*.parquet"))] == ["a", "b", "c"]
    assert [row["x"] for row in rows_of(source_of(tmp_path, "."))] == ["a", "b", "c"]
    assert [row["x"] for row in rows_of(source_of(tmp_path, ["c.parquet", "*.parquet"]))] == ["c", "a", "b"]


def test_positions_run_on_over_files_and_row_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": list(range(25)), "y": ["t"] * 25})
    write_parquet(tmp_path / "1.parquet", {"x": list(range(25, 40)), "y": ["t"] * 15})
    source = source_of(tmp_path, "*.parquet")
    assert [row["x"] for row in rows_of(source)] == list(range(40))
    assert rows_of(source, 23, ["x"]) == [{"x": value} for value in range(23, 40)]
    assert [file.rows for file in source.files] == [25, 15]
    assert source.num_rows == 40
    assert source.place(26) == "1.parquet row 2"


def test_limit_counts_rows(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": list(range(25))})
    (tmp_path / "1.jsonl").write_text("".join(f'{{"x": {value}}}\n' for value in range(25, 60)))
    source = source_of(tmp_path, ["0.parquet", "1.jsonl"], limit=27)
    assert [row["x"] for row in rows_of(source)] == list(range(27))


def test_a_projection_to_no_column_still_has_rows(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": list(range(25))})
    assert sum(batch.num_rows for batch in source_of(tmp_path, "0.parquet").batches(columns=[])) == 25


def test_a_damaged_row_group_is_as_many_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    values = {"x": [f"value {number} {'y' * 50}" for number in range(30)]}
    pq.write_table(pa.table(values), path, row_group_size=10, write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset - 30] ^= 0xFF  # inside the dictionary page
    path.write_bytes(data)
    source = source_of(tmp_path, "0.parquet")
    errors = errors_of(source)
    assert sorted(errors) == list(range(10, 20))
    assert "0.parquet: row group 1 is damaged" in errors[10]
    rows = rows_of(source)
    assert [row["x"] for row in rows[:10] + rows[20:]] == values["x"][:10] + values["x"][20:]


@pytest.mark.parametrize("content", [b"", b"PAR1 nothing PAR1", b"not parquet at all"])
def test_a_file_without_footer_ends_the_job_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.parquet: not a readable Parquet file") as caught:
        source_of(tmp_path, "broken.parquet")
    assert caught.value.exit_code == 1


def test_memory_is_about_one_row_group(tmp_path: Path) -> None:
    path = tmp_path / "big.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", pa.string())])) as writer:
        for number in range(40):
            writer.write_table(pa.table({"x": [f"{number}-{row}-{'z' * 1000}" for row in range(1000)]}))
    source = source_of(tmp_path, "big.parquet")
    peak = 0
    before = pa.total_allocated_bytes()
    for _ in source.batches():
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 0 < peak < 6 << 20  # the file holds 40 MB, a row group 1


def test_types_pass_unchanged(tmp_path: Path) -> None:
    table = pa.table(
        {
            "fixed": pa.array([b"abcd", None], pa.binary(4)),
            "large": pa.array([["a"], None], pa.large_list(pa.large_string())),
            "time": pa.array([5, None], pa.time32("s")),
            "nested": pa.array([{"a": None, "b": [1]}, None]),
            "category": pa.array(["x", "y"]).dictionary_encode(),
            "stamp": pa.array([1, 2], pa.timestamp("ns", "UTC")),
        }
    )
    pq.write_table(table, tmp_path / "0.parquet")
    source = source_of(tmp_path, "0.parquet")
    [batch] = source.batches()
    assert pa.Table.from_batches([batch.columns]).equals(pq.read_table(tmp_path / "0.parquet"))
    assert batch.columns.to_pylist() == table.to_pylist()


def test_arrow_file_stream_and_saved_data_set(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    table = pa.table({"x": list(range(7))})
    for name, make in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with make(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        source = source_of(tmp_path, f"{name}.arrow")
        assert rows_of(source, 2) == [{"x": value} for value in range(2, 7)]
    features = Features({"x": ClassLabel(names=["no", "yes"]), "t": Value("string")})
    Dataset.from_dict({"x": [0, 1, 1], "t": ["a", "b", "c"]}, features).save_to_disk(tmp_path / "saved", num_shards=2)
    source = source_of(tmp_path, "saved")
    assert [row["x"] for row in rows_of(source)] == [0, 1, 1]
    assert Features.from_arrow_schema(source.schema) == features


def test_a_saved_dataset_dict_needs_a_split_it_has(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict({"test": Dataset.from_dict({"x": [1]})}).save_to_disk(tmp_path / "saved")
    assert rows_of(source_of(tmp_path, "saved", split="test")) == [{"x": 1}]
    with pytest.raises(InputError, match="has no split 'train', only test") as caught:
        source_of(tmp_path, "saved")
    assert caught.value.exit_code == 2
    write_parquet(tmp_path / "a.parquet", {"x": [1]})
    with pytest.raises(InputError, match=r"input\.split"):
        source_of(tmp_path, "a.parquet", split="test")


def test_a_stream_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.arrow"
    table = pa.table({"x": list(range(1000))})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(InputError, match=r"cut\.arrow: not a readable Arrow file"):
        source_of(tmp_path, "cut.arrow")


def test_schemas_of_files_are_brought_together(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"items": [], "n": 1}\n')
    (tmp_path / "1.jsonl").write_text('{"items": [{"a": 1}], "n": 2.5}\n{"items": null, "extra": "e"}\n')
    write_parquet(tmp_path / "2.parquet", {"n": pa.array([3], pa.int32()), "items": pa.nulls(1)})
    source = source_of(tmp_path, ["0.jsonl", "1.jsonl", "2.parquet"])
    assert source.schema.field("items").type == pa.list_(pa.struct([("a", pa.int64())]))
    assert [row["n"] for row in rows_of(source)] == [1.0, 2.5, None, 3.0]
    assert [row["items"] for row in rows_of(source)] == [[], [{"a": 1}], None, None]
    assert [row["extra"] for row in rows_of(source)] == [None, None, "e", None]


def test_files_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": [1]})
    write_parquet(tmp_path / "1.parquet", {"x": ["one"]})
    with pytest.raises(InputError, match=r"1\.parquet: column 'x' is string, but int64 in files before it"):
        source_of(tmp_path, "*.parquet")


def test_broken_utf8_in_arrow_text_is_replaced_and_counted(tmp_path: Path) -> None:
    raw = pa.array([b"fine", "a\udc00b".encode("utf-8", "surrogatepass"), None, b"x\xff"], pa.binary())
    table = pa.table({"t": pa.Array.from_buffers(pa.string(), 4, raw.buffers()), "n": [1, 2, 3, 4]})
    with pa.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    source = source_of(tmp_path, "t.arrow")
    assert [row["t"] for row in rows_of(source)] == ["fine", "a\ufffdb", None, "x\ufffd"]
    assert source.replaced_surrogates == 2


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("none.parquet", "none.parquet does not exist"),
        ("*.parquet", "matches no file"),
        ("empty", "holds no file that can be read"),
        ("a.parquet.gz", "compressed files"),
        ("mixed", "holds jsonl and parquet files, set input.format"),
        ("a.dat", "cannot tell the format"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path: Path, path: str, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    for name in ("table.csv", "a.parquet.gz", "a.dat", "mixed/a.jsonl", "mixed/b.parquet"):
        (tmp_path / name).write_text("")
    with pytest.raises(InputError, match=expected.replace("*", r"\*")) as caught:
        source_of(tmp_path, path)
    assert caught.value.exit_code == 2
    with pytest.raises(InputError):
        sample_schema(InputSettings(path=path), tmp_path)


def test_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "0.parquet")
    with pytest.raises(InputError, match="holds the column 'x' twice"):
        source_of(tmp_path, "0.parquet")


def test_equal_ids_name_both_places(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"k": ["a", "b", None]})
    (tmp_path / "1.jsonl").write_text('{"k": "c"}\n\nbroken\n{"k": "b"}\n{"k": null}\n')
    with pytest.raises(InputError, match=r"column 'k' holds 'b' twice: 0\.parquet row 2, 1\.jsonl line 4") as caught:
        source_of(tmp_path, ["0.parquet", "1.jsonl"], id="k")
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match=r"input\.id: the input has no column 'key', only k"):
        source_of(tmp_path, "0.parquet", id="key")
    source_of(tmp_path, "0.parquet", id="k")


def test_ids_with_equal_hashes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.pipeline.unique._hash", lambda value: 7)
    write_parquet(tmp_path / "0.parquet", {"k": list(range(30))})
    source_of(tmp_path, "0.parquet", id="k")
    write_parquet(tmp_path / "1.parquet", {"k": [*range(29), 3]})
    with pytest.raises(InputError, match="holds 3 twice"):
        source_of(tmp_path, "1.parquet", id="k")


def test_the_sample_reads_little(tmp_path: Path) -> None:
    lines = ['{"a": 1}\n'] * 5000 + ['{"b": 2}\n']
    (tmp_path / "0.jsonl").write_text("".join(lines))
    assert sample_schema(InputSettings(path="0.jsonl"), tmp_path).names == ["a"]
    assert source_of(tmp_path, "0.jsonl").schema.names == ["a", "b"]


def test_numbers_of_files_widen(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": pa.array([1], pa.int32())})
    write_parquet(tmp_path / "1.parquet", {"x": pa.array([2**40], pa.int64())})
    assert [row["x"] for row in rows_of(source_of(tmp_path, "*.parquet"))] == [1, 2**40]
    assert np.int64 == source_of(tmp_path, "*.parquet").schema.field("x").type.to_pandas_dtype()


def test_globs_leave_out_hidden_folders_unless_they_are_named(tmp_path: Path) -> None:
    for folder in ("a", ".cache", "out/__batchgen__", "out"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "rows.jsonl").write_text(f'{{"x": "{folder}"}}\n')
    assert [row["x"] for row in rows_of(source_of(tmp_path, "**/*.jsonl"))] == ["a", "out"]
    assert [row["x"] for row in rows_of(source_of(tmp_path, "out/__batchgen__/*.jsonl"))] == ["out/__batchgen__"]


def test_a_base_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    base = tmp_path / "[a]"
    base.mkdir()
    write_parquet(base / "0.parquet", {"x": ["inside"]})
    assert [row["x"] for row in rows_of(source_of(base, "*.parquet"))] == ["inside"]
    assert [row["x"] for row in rows_of(source_of(tmp_path, str(base.parent / "[[]a]" / "*.parquet")))] == ["inside"]


def test_globs_and_directories_have_the_same_order(tmp_path: Path) -> None:
    for name in ("d/z", "d-e", "d/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path / f"{name}.parquet", {"x": [name]})
    by_directory = rows_of(source_of(tmp_path, "."))
    assert rows_of(source_of(tmp_path, "**/*.parquet")) == by_directory
    assert [row["x"] for row in by_directory] == ["d/a", "d/z", "d-e"]


def test_the_number_of_rows_is_counted_once() -> None:
    class Counting(FileIdentity):
        asked = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "rows":
                Counting.asked += 1
            return super().__getattribute__(name)

    files = [Counting(str(number), 1, 1, 1) for number in range(100)]
    runs = [Run(cast(Any, None), file, 0, start) for start, file in enumerate(files)]
    source = FileSource(runs, pa.schema([]), None)
    assert len(source.files) == source.num_rows == 100
    assert Counting.asked <= 300


def test_whole_numbers_that_a_column_of_floats_cannot_hold_are_their_rows_error(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"k": [1, 2**53 + 1, 3], "x": ["a", "b", "c"]})
    with pa.ipc.new_file(str(tmp_path / "c.arrow"), pa.schema([("k", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"k": [2**60 + 1, 5]}))
    write_parquet(tmp_path / "b.parquet", {"k": [0.5], "x": ["d"]})
    source = source_of(tmp_path, ["a.parquet", "b.parquet", "c.arrow"])
    message = "column 'k' is double, which cannot hold"
    assert errors_of(source) == {
        1: f"a.parquet row 2: {message} 9007199254740993",
        4: f"c.arrow row 1: {message} 1152921504606846977",
    }
    assert [row["k"] for row in rows_of(source)] == [1.0, None, 3.0, 0.5, None, 5.0]
    assert rows_of(source)[1] == {"k": None, "x": None}


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_views_are_read_as_plain_text(tmp_path: Path, form: str) -> None:
    columns = {
        "t": pa.array(["a", None, "c"], pa.string_view()),
        "b": pa.array([b"a", None, b"c"], pa.binary_view()),
    }
    if form == "arrow":
        columns["l"] = pa.array([["x"], None, []], pa.list_(pa.string_view()))
        columns["s"] = pa.array([{"m": [("k", "v")]}] * 3, pa.struct([("m", pa.map_(pa.string(), pa.string_view()))]))
    table = pa.table(columns)
    if form == "arrow":
        with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, tmp_path / "a.parquet")
    source = source_of(tmp_path, f"a.{form}")
    assert "view" not in str(source.schema)
    assert source.schema.field("t").type == pa.string()
    assert rows_of(source) == table.to_pylist()
    [batch] = source.batches()
    assert batch.columns.filter(pa.array([False, False, True])).column(0).to_pylist() == ["c"]
