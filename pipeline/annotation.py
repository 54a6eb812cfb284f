"""`annotate`: a data set in, the same data set with answers out, without a job file or an output directory.

Knows datasets and the engine's facade; rows go the same way as those of a job.
"""

import datetime
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from batchgen.engine.config import GenerationSettings
from batchgen.engine.explain import validated
from batchgen.engine.generation import resolve_generation

from .config import PromptSettings
from .flow import Generator, answers
from .parsed import AnswerParser
from .prompt import Renderer
from .reorder import arrange
from .result import ResultEncoder, further_columns, result_schema
from .rows import FileIdentity, RowBatch, Skipped
from .text import repair_text

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_BATCH_ROWS = 1000
_STREAMS: list["tempfile.TemporaryDirectory[str]"] = []  # removed when the process ends: results may be mapped anywhere


class LoadedEngine(Generator, Protocol):
    """What `annotate` needs of an engine."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def context_length(self) -> int: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...


def annotate(
    dataset: "Dataset | IterableDataset",
    *,
    model: str | LoadedEngine,
    prompt: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    prefix: str = "",
    parse: bool = False,
    choice_probs: bool = False,
    **engine_options: Any,
) -> "Dataset":
    """Answers every row of `dataset`; returns its rows, in order, with the result columns beside them.

    `prompt` and `generation` hold the keys of those sections of a job file; `parse` and `choice_probs` are those of its
    output section. `model` is a path, a Hub id or a loaded `Engine`; `engine_options` go to `Engine.load`. A row that
    fails has its `error` set; rows that a policy skips are left out. Raises ValueError for a bad setting or a column
    whose name a result column needs. A stream is read into files that stay until the process ends; `save_to_disk` keeps
    the result for longer.
    """
    settings = validated(PromptSettings, prompt, "prompt")
    sampling = validated(GenerationSettings, generation or {}, "generation")
    parser = _parser(sampling, parse)
    more = further_columns(sampling.n, parser, choice_probs, attempts=False)
    results = result_schema(sampling.n, sampling.logprobs is not None, prefix, more)
    rows = _materialised(dataset)
    _refuse_collisions(rows.column_names, results)
    engine = _engine(model, engine_options)
    base = replace(resolve_generation(sampling, engine.generation_config)[0], choice_probs=choice_probs)
    _refuse_no_room(base.max_tokens, engine.context_length)
    per_row = {str(key): column for key, column in sampling.per_row.items()}
    today = datetime.date.today().isoformat()
    if settings.reorder:
        settings = arrange(settings, DatasetSource(rows)).applied(settings)
    renderer = Renderer(settings, base, per_row, engine.tokenizer, engine.context_length, today)
    encoder = ResultEncoder(engine.tokenizer, base, engine.eos_ids, results=results, parser=parser)
    return _joined(rows, encoder, _collect(DatasetSource(rows), renderer, engine, encoder))


@dataclass(frozen=True)
class DatasetSource:
    """The rows of a `datasets.Dataset`, in its order, whatever indices it holds."""

    dataset: "Dataset"
    files: list[FileIdentity] = field(default_factory=list)
    replaced_surrogates: int = 0
    unfinished: Sequence[str] = ()
    repeated: Sequence[int] = ()

    @property
    def schema(self) -> pa.Schema:
        return self.dataset.features.arrow_schema

    @property
    def num_rows(self) -> int:
        return len(self.dataset)

    def batches(self, start: int = 0, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        names = self.dataset.column_names if columns is None else list(columns)
        rows = self.dataset.with_format("arrow").select_columns(names)
        for first in range(start, self.num_rows, _BATCH_ROWS):
            stop = min(first + _BATCH_ROWS, self.num_rows)
            table = rows[first:stop] if names else None
            yield RowBatch(first, _one_batch(table, stop - first))

    def place(self, position: int) -> str:
        return f"row {position}"


def _one_batch(table: pa.Table | None, num_rows: int) -> pa.RecordBatch:
    if table is None:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
    columns = [pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type) for column in table]
    return repair_text(pa.RecordBatch.from_arrays(columns, schema=table.schema))[0]


def _materialised(dataset: "Dataset | IterableDataset") -> "Dataset":
    """The data set itself; a stream is read into memory-mapped files first, which copies in other processes share."""
    from datasets import Dataset

    if isinstance(dataset, Dataset):
        return dataset
    directory = tempfile.TemporaryDirectory(prefix="batchgen-")
    _STREAMS.append(directory)
    if dataset.features is None:  # they are learned from the rows, which hold nothing encoded then
        return Dataset.from_generator(lambda: iter(dataset), cache_dir=directory.name)
    path = Path(directory.name) / "rows.arrow"
    _write_stream(dataset, path)
    return Dataset.from_file(str(path))


def _write_stream(dataset: "IterableDataset", path: Path) -> None:
    """Rows as they are stored: nothing is decoded, so no codec is needed and nothing is encoded anew."""
    schema = dataset.features.arrow_schema
    examples = iter(dataset.decode(False))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while rows := list(islice(examples, _BATCH_ROWS)):
            columns = [_column([row.get(field.name) for row in rows], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    return pa.array(values, kind)


def _engine(model: str | LoadedEngine, options: Mapping[str, Any]) -> LoadedEngine:
    if not isinstance(model, str):
        if options:
            raise ValueError(f"{next(iter(options))}: goes with a model's path, not with an engine that is loaded")
        return model
    from batchgen.engine import Engine

    engine: LoadedEngine = Engine.load(model, **options)
    return engine


def _parser(generation: GenerationSettings, parse: bool) -> AnswerParser | None:
    if parse and not isinstance(generation.json_schema, dict):
        raise ValueError("parse: needs json_schema in generation")
    return AnswerParser(generation.json_schema) if parse and isinstance(generation.json_schema, dict) else None


def _refuse_collisions(columns: Sequence[str], results: pa.Schema) -> None:
    taken = [name for name in results.names if name in columns]
    if taken:
        raise ValueError(f"the data set has a column {taken[0]!r} already; set prefix")


def _refuse_no_room(max_tokens: int, context_length: int) -> None:
    if max_tokens >= context_length:
        raise ValueError(f"max_tokens: {max_tokens} leaves no room for a prompt in the context of {context_length}")


def _collect(
    source: DatasetSource, renderer: Renderer, engine: LoadedEngine, encoder: ResultEncoder
) -> tuple[pa.Table, list[int]]:
    """The results by position, and the positions of rows that were skipped."""
    skipped: list[int] = []

    def skip(rows: list[Skipped]) -> None:
        skipped.extend(row.position for row in rows)

    with closing(answers(source, renderer, engine, encoder, skip=skip)) as found:
        batches = [batch for batch in found if batch.num_rows]
    table = pa.Table.from_batches(batches, encoder.schema)
    return table.take(np.argsort(table.column("position").to_numpy())), skipped


def _joined(rows: "Dataset", encoder: ResultEncoder, collected: tuple[pa.Table, list[int]]) -> "Dataset":
    from datasets import Dataset, Features, concatenate_datasets

    results, skipped = collected
    kept = rows.select(np.setdiff1d(np.arange(len(rows)), skipped)) if skipped else rows
    answers_only = Dataset(results.select(encoder.results.names))
    if not len(answers_only):  # concatenate_datasets would leave its columns out
        features = Features({**rows.features, **answers_only.features})
        return Dataset.from_dict({name: [] for name in features}, features)
    return concatenate_datasets([kept.with_format(None), answers_only], axis=1)
