"""Output formats: how rows become the files of a finished data set.

Knows file names and formats; which rows belong into a shard, and when, is decided by the job.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from .jsonout import json_lines
from .place import AnyPath, create_file
from .schema import conform, record_batch
from .storage import publish

_BATCH_BYTES = 256 << 20  # far from the 2 GiB that 32-bit offsets can address
_ROW_GROUP_BYTES = 64 << 20


class OutputError(Exception):
    """The output cannot hold these columns: one line with the cure (exit code 2)."""

    exit_code = 2


class Sink(Protocol):
    """One output format; its files hold the columns of `schema`."""

    schema: pa.Schema
    single_file: bool  # all rows go into one shard
    beside: tuple[str, ...]  # what `finish` may add, by relative name

    def shard_name(self, index: int, total: int) -> str:
        """Path of a shard relative to the output directory."""
        ...

    def write(self, path: AnyPath, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes one shard. Without batches it holds no rows and the full schema."""
        ...

    def finish(self, directory: AnyPath, shards: Sequence[str], aside: AnyPath) -> None:
        """Writes what stands beside the shards, as the last visible files; `aside` is a directory to write in."""
        ...


def make_sink(output_format: Literal["arrow", "parquet", "jsonl"], schema: pa.Schema) -> Sink:
    """The sink of a job. Raises OutputError naming a column that the format cannot hold."""
    return _SINKS[output_format](schema)


def num_shards(sink: Sink, num_rows: int, shard_rows: int) -> int:
    """How many shards so many rows need; at least one."""
    return 1 if sink.single_file else max(1, -(-num_rows // shard_rows))


def write_shard(
    sink: Sink, batches: Iterable[pa.RecordBatch], directory: AnyPath, index: int, total: int, aside: AnyPath
) -> str:
    """Writes shard `index` of `total` in the directory `aside`, then moves it into place; returns its name."""
    name = sink.shard_name(index, total)
    temporary = aside / name.replace("/", "-")
    sink.write(temporary, batches)
    publish(temporary, directory / name)
    return name


class ArrowSink:
    """What `datasets.Dataset.save_to_disk` writes: Arrow streams, dataset_info.json, state.json."""

    single_file = False
    beside: tuple[str, ...] = ("dataset_info.json", "state.json")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema, self._features = _with_features(_without_dictionaries(schema))

    def shard_name(self, index: int, total: int) -> str:
        return f"data-{index:05d}-of-{total:05d}.arrow"

    def write(self, path: AnyPath, batches: Iterable[pa.RecordBatch]) -> None:
        with create_file(path) as file, pa.ipc.new_stream(file, self.schema) as writer:
            for batch in batches:
                for part in cut_by_bytes(_conformed(batch, self.schema), _BATCH_BYTES):
                    writer.write_batch(part)

    def finish(self, directory: AnyPath, shards: Sequence[str], aside: AnyPath) -> None:
        info = {"citation": "", "description": "", "features": self._features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in shards],
            "_fingerprint": _fingerprint(directory, shards),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": "train",
        }
        for name, content in (("dataset_info.json", info), ("state.json", state)):
            (aside / name).write_bytes((json.dumps(content, indent=2) + "\n").encode())
            publish(aside / name, directory / name)


class ParquetSink:
    """Parquet files as `load_dataset("parquet")` and every other reader takes them."""

    single_file = False
    beside: tuple[str, ...] = ()

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def shard_name(self, index: int, total: int) -> str:
        return f"data/train-{index:05d}-of-{total:05d}.parquet"

    def write(self, path: AnyPath, batches: Iterable[pa.RecordBatch]) -> None:
        with create_file(path) as file, pq.ParquetWriter(file, self.schema) as writer:
            for group in _groups(batches, self.schema):
                writer.write_table(pa.Table.from_batches(group, self.schema), row_group_size=1 << 20)

    def finish(self, directory: AnyPath, shards: Sequence[str], aside: AnyPath) -> None:
        """Nothing stands beside Parquet files."""


class JsonlSink:
    """One JSON object per row, all in `data.jsonl`; jsonout.py tells how values without a JSON form are written."""

    single_file = True
    beside: tuple[str, ...] = ()

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def shard_name(self, index: int, total: int) -> str:
        return "data.jsonl"

    def write(self, path: AnyPath, batches: Iterable[pa.RecordBatch]) -> None:
        with path.open("wb") as file:
            for batch in batches:
                for part in cut_by_bytes(batch, _ROW_GROUP_BYTES):
                    file.writelines(json_lines(part))

    def finish(self, directory: AnyPath, shards: Sequence[str], aside: AnyPath) -> None:
        """Nothing stands beside the file."""


_SINKS: dict[str, type[ArrowSink] | type[ParquetSink] | type[JsonlSink]] = {
    "arrow": ArrowSink,
    "parquet": ParquetSink,
    "jsonl": JsonlSink,
}


def cut_by_bytes(batch: pa.RecordBatch, limit: int) -> Iterator[pa.RecordBatch]:
    """The batch in parts of about `limit` bytes; one row is never cut."""
    if batch.num_rows <= 1 or batch.nbytes <= limit:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from cut_by_bytes(batch.slice(0, middle), limit)
    yield from cut_by_bytes(batch.slice(middle), limit)


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[list[pa.RecordBatch]]:
    """Batches gathered into row groups of moderate size."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        for part in cut_by_bytes(_conformed(batch, schema), _ROW_GROUP_BYTES):
            group.append(part)
            if sum(member.nbytes for member in group) >= _ROW_GROUP_BYTES:
                yield group
                group = []
    if group:
        yield group


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [conform(batch.column(field.name), field.type) for field in schema]
    return record_batch(columns, schema, batch.num_rows)


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """`datasets` reads dictionary columns as plain ones, so they are stored as plain ones."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
    ]
    return pa.schema(fields, schema.metadata)


def _with_features(schema: pa.Schema) -> tuple[pa.Schema, dict[str, Any]]:
    """The schema with its features in the metadata, where `datasets` looks for them; and these features."""
    from datasets import Features  # registers the extension types that read_schema then knows

    for field in schema:
        try:
            Features.from_arrow_schema(pa.ipc.read_schema(pa.schema([field], schema.metadata).serialize()))
        except (ValueError, NotImplementedError) as error:
            cure = "use output.format parquet, or leave it out with output.columns"
            raise OutputError(
                f"output.format: arrow cannot hold column {field.name!r} ({field.type}); {cure}"
            ) from error
    features = Features.from_arrow_schema(pa.ipc.read_schema(schema.serialize())).to_dict()
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    return schema.with_metadata(metadata), features


def _fingerprint(directory: AnyPath, shards: Sequence[str]) -> str:
    sizes = [(name, (directory / name).stat().st_size) for name in shards]
    return hashlib.blake2b(json.dumps(sizes).encode(), digest_size=8).hexdigest()
