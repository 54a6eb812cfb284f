"""Output files: what is written loads with the tools people use, with the same values and one schema."""

import datetime
import decimal
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Features, List, Sequence, Value, load_dataset, load_from_disk
from stand_ins import ByteTokenizer

from batchgen.engine.request import Sampling
from batchgen.pipeline.result import ResultEncoder, result_schema
from batchgen.pipeline.sink import OutputError, Sink, cut_by_bytes, make_sink, num_shards, write_shard

FORMATS = ["arrow", "parquet", "jsonl"]
CARRIED = pa.table(
    {
        "fixed": pa.array([b"abcd", None, b"\x00\xff\x01\x02"], pa.binary(4)),
        "large": pa.array([["a", None], None, []], pa.large_list(pa.large_string())),
        "time": pa.array([5, None, 7], pa.time32("s")),
        "nested": pa.array([{"a": None, "b": [{"c": 1}]}, None, {"a": 2.5, "b": None}]),
        "day": pa.array([datetime.date(2024, 2, 29), None, None]),
        "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2.25")]),
        "text": pa.array(["é\u2028\n", "", None]),
        "number": pa.array([math.nan, math.inf, 1.5]),
    }
)


def publish(base: Path, sink: Sink, tables: list[pa.Table]) -> Path:
    directory, aside = base / "out", base / "aside"
    directory.mkdir()
    aside.mkdir()
    names = [
        write_shard(sink, table.to_batches(), directory, index, len(tables), aside)
        for index, table in enumerate(tables)
    ]
    sink.finish(directory, names, aside)
    assert list(aside.iterdir()) == []
    return directory


def load(output_format: str, directory: Path, cache: Path) -> Any:
    if output_format == "arrow":
        return load_from_disk(str(directory))
    loader = {"parquet": "parquet", "jsonl": "json"}[output_format]
    files = str(directory / ("data/*.parquet" if loader == "parquet" else "data.jsonl"))
    return load_dataset(loader, data_files=files, split="train", cache_dir=str(cache))


def test_arrow_and_parquet_keep_types_and_values(tmp_path: Path) -> None:
    for output_format in ("arrow", "parquet"):
        base = tmp_path / output_format
        base.mkdir()
        sink = make_sink(output_format, CARRIED.schema)  # type: ignore[arg-type]
        directory = publish(base, sink, [CARRIED.slice(0, 2), CARRIED.slice(2)])
        loaded = load(output_format, directory, base / "cache")
        table = loaded.data.table.combine_chunks()
        assert repr(table.to_pylist()) == repr(CARRIED.to_pylist())
        for name in (
            "fixed",
            "day",
            "price",
            *(["time"] if output_format == "arrow" else []),
        ):  # Parquet has no seconds
            assert table.schema.field(name).type == CARRIED.schema.field(name).type
    files = sorted((tmp_path / "arrow" / "out").glob("*.arrow"))
    assert [path.name for path in files] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    read = pa.concat_tables([pa.ipc.open_stream(path.read_bytes()).read_all() for path in files])
    assert repr(read.to_pylist()) == repr(CARRIED.to_pylist())
    files = sorted((tmp_path / "parquet" / "out").rglob("*.parquet"))
    assert [path.name for path in files] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert pq.ParquetDataset(files).read().num_rows == 3


def test_features_of_the_input_are_kept(tmp_path: Path) -> None:
    features = Features({"label": ClassLabel(names=["no", "yes"]), "tags": List(Value("string"))})
    schema = pa.schema([*features.arrow_schema, *result_schema(1, False)], features.arrow_schema.metadata)
    encoder = ResultEncoder(ByteTokenizer(), Sampling(), frozenset())
    table = pa.table({"label": [1], "tags": [["a"]]}, schema=pa.schema(list(features.arrow_schema)))
    for name in encoder.results.names:
        table = table.append_column(encoder.results.field(name), pa.nulls(1, encoder.results.field(name).type))
    for output_format in ("arrow", "parquet"):
        base = tmp_path / output_format
        base.mkdir()
        directory = publish(base, make_sink(output_format, schema), [table])  # type: ignore[arg-type]
        loaded = load(output_format, directory, base / "cache")
        assert loaded.features["label"] == features["label"]
        assert loaded.features["completion"] == Value("string")
        assert loaded[0]["label"] == 1


def test_extension_types_pass_through(tmp_path: Path) -> None:
    from datasets import Array2D, Dataset

    features = Features({"grid": Array2D((2, 2), "int32")})
    data = Dataset.from_dict({"grid": [[[1, 2], [3, 4]]]}, features)
    directory = publish(tmp_path, make_sink("arrow", features.arrow_schema), [data.data.table])
    loaded = load_from_disk(str(directory))
    assert loaded.features == features
    assert loaded[0]["grid"] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("output_format", FORMATS)
def test_no_rows_still_have_the_full_schema(tmp_path: Path, output_format: str) -> None:
    schema = pa.schema([("x", pa.string()), *result_schema(2, True)])
    sink = make_sink(output_format, schema)  # type: ignore[arg-type]
    assert num_shards(sink, 0, 100) == 1
    directory = publish(tmp_path, sink, [schema.empty_table()])
    if output_format == "jsonl":
        assert (directory / "data.jsonl").read_bytes() == b""
    elif output_format == "parquet":  # load_dataset takes no split without rows, whoever wrote it
        assert pq.read_table(directory / "data" / "train-00000-of-00001.parquet").schema.equals(schema)
    else:
        loaded = load_from_disk(str(directory))
        assert loaded.num_rows == 0
        assert loaded.features.arrow_schema.equals(schema)


def test_dictionary_columns_keep_their_values(tmp_path: Path) -> None:
    column = pa.array(["x", "y", "x", None]).dictionary_encode()
    table = pa.table({"c": column})
    other = pa.table({"c": pa.array(["z"]).dictionary_encode()})
    for output_format in ("arrow", "parquet"):
        (tmp_path / output_format).mkdir()
        sink = make_sink(output_format, table.schema)  # type: ignore[arg-type]
        directory = publish(tmp_path / output_format, sink, [pa.concat_tables([table, other])])
        loaded = load(output_format, directory, tmp_path / "cache")
        assert loaded["c"][:] == ["x", "y", "x", None, "z"]


def test_a_type_that_data_sets_cannot_hold_is_refused_by_name() -> None:
    schema = pa.schema([("fine", pa.int64()), ("pairs", pa.map_(pa.string(), pa.int32()))])
    with pytest.raises(
        OutputError, match=r"arrow cannot hold column 'pairs' \(map<string, int32>\); use output\.format parquet"
    ):
        make_sink("arrow", schema)
    make_sink("parquet", schema)
    make_sink("jsonl", schema)


def test_jsonl_is_strict_and_one_object_per_row(tmp_path: Path) -> None:
    directory = publish(tmp_path, make_sink("jsonl", CARRIED.schema), [CARRIED])
    lines = (directory / "data.jsonl").read_bytes().decode().removesuffix("\n").split("\n")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows[0] == {
        "fixed": "YWJjZA==",
        "large": ["a", None],
        "time": "00:00:05",
        "nested": {"a": None, "b": [{"c": 1}]},
        "day": "2024-02-29",
        "price": "1.50",
        "text": "é\u2028\n",
        "number": None,
    }
    assert [row["number"] for row in rows] == [None, None, 1.5]
    assert list(rows[1]) == CARRIED.schema.names


def test_jsonl_writes_times_as_iso_text_wherever_they_stand(tmp_path: Path) -> None:
    moment = datetime.datetime(2020, 1, 2, 3, 4, 5, 600_000)
    table = pa.table(
        {
            "nanos": pa.array([moment], pa.timestamp("ns")),
            "zoned": pa.array([moment], pa.timestamp("us", "UTC")),
            "nested": pa.array([{"list": [moment]}], pa.struct([("list", pa.list_(pa.timestamp("s")))])),
            "span": pa.array([5], pa.duration("ms")),
            "pairs": pa.array([[("k", b"ab")]], pa.map_(pa.string(), pa.binary())),
            "none": pa.nulls(1),
        }
    )
    directory = publish(tmp_path, make_sink("jsonl", table.schema), [table])
    assert json.loads((directory / "data.jsonl").read_text()) == {
        "nanos": "2020-01-02T03:04:05.600000000",
        "zoned": "2020-01-02T03:04:05.600000+0000",
        "nested": {"list": ["2020-01-02T03:04:05"]},
        "span": 5,
        "pairs": [["k", "YWI="]],
        "none": None,
    }


def test_all_jsonl_rows_go_into_one_file() -> None:
    sink = make_sink("jsonl", CARRIED.schema)
    assert num_shards(sink, 1_000_000, 10) == 1
    assert num_shards(make_sink("parquet", CARRIED.schema), 21, 10) == 3


def test_nothing_shows_when_writing_fails(tmp_path: Path) -> None:
    def batches() -> Any:
        yield from CARRIED.to_batches()
        raise OSError("disk full")

    for output_format in FORMATS:
        directory, aside = tmp_path / output_format, tmp_path / f"{output_format}-aside"
        directory.mkdir()
        aside.mkdir()
        with pytest.raises(OSError, match="disk full"):
            write_shard(make_sink(output_format, CARRIED.schema), batches(), directory, 0, 1, aside)  # type: ignore[arg-type]
        assert list(directory.iterdir()) == []


def test_state_json_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(aside: Path, final: Path) -> None:
        order.append(final.name)
        aside.rename(final)

    monkeypatch.setattr("batchgen.pipeline.sink.publish", note)
    publish(tmp_path, make_sink("arrow", CARRIED.schema), [CARRIED])
    assert order == ["data-00000-of-00001.arrow", "dataset_info.json", "state.json"]


def test_large_batches_are_cut_by_bytes() -> None:
    batch = pa.record_batch({"t": ["x" * 1000] * 100})
    parts = list(cut_by_bytes(batch, 10_000))
    assert max(part.nbytes for part in parts) <= 10_500
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([batch]))
    assert len(list(cut_by_bytes(pa.record_batch({"t": ["x" * 1000]}), 10))) == 1


def test_old_sequence_features_still_load(tmp_path: Path) -> None:
    features = Features({"s": Sequence({"a": Value("int32")})})
    schema = features.arrow_schema
    table = pa.table({"s": pa.array([{"a": [1, 2]}], schema.field("s").type)})
    directory = publish(tmp_path, make_sink("arrow", schema), [table])
    assert load_from_disk(str(directory))[0] == {"s": {"a": [1, 2]}}
