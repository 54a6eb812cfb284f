"""Generates the open rows of a job: model, renderer and encoder are put together here, and answers journaled.

Knows the order in which these parts are made; publishing is not known here.
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.engine.generation import resolve_generation
from batchgen.engine.request import Sampling
from batchgen.pipeline.flow import answers
from batchgen.pipeline.prompt import Renderer
from batchgen.pipeline.result import ResultEncoder
from batchgen.pipeline.rows import Skipped, Source

from .errors import JobError, UsageError
from .finish import journal_schema
from .job import Job
from .metrics import MetricsFile
from .models import LoadedModel, Models
from .outcomes import SKIPPED, codes_of
from .output import Output
from .progress import Meter, Progress, choose_display
from .writer import JournalWriter

_LOG_SECONDS = 30.0
_PACKAGES = ("batchgen", "torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")


class Generation:
    """One pass over the rows that are open, journaling every outcome."""

    def __init__(self, job: Job, models: Models, output: Output, source: Source) -> None:
        self._job = job
        self._output = output
        self._source = source
        self.sampling, self.origins = resolve_sampling(job, models)
        self.engine = models.engine(job)
        self.renderer = make_renderer(job, models, self.sampling, self.engine.tokenizer, output.manifest.template_date)
        prefix = job.output.prefix
        self.encoder = ResultEncoder(self.engine.tokenizer, self.sampling, self.engine.bounds.eos_ids, prefix)
        self._schema = journal_schema(self.encoder.results)
        self._prefix = prefix
        self._last_error: str | None = None
        self._next_log = time.monotonic() + _LOG_SECONDS

    def describe(self) -> None:
        """Stores in the manifest what this run resolved to."""
        self._output.describe(
            settings=resolved_settings(self._job, self.sampling, self.origins),
            model={"path": self._job.model.path, "digest": self._output.manifest.identity["model"]["digest"]},
            tokenizer={"path": self._job.tokenizer_path, "digest": self.engine.tokenizer.digest()},
            versions=installed_versions(),
        )

    def run(self, todo: NDArray[np.bool_], quiet: bool, log_format: str) -> None:
        """Asks every row where `todo` is true. What has been yielded when this is broken off is journaled."""
        self._meter = Meter(int(todo.sum()))
        displays = [choose_display(quiet, log_format)]
        if self._job.run.metrics_file is not None:
            displays.append(MetricsFile(self._job.base / self._job.run.metrics_file, self._job.name))
        seconds = self._job.run.checkpoint_seconds
        with ExitStack() as stack:
            self._journal = stack.enter_context(JournalWriter(self._output.journal, seconds))
            for display in displays:
                stack.enter_context(Progress(self.snapshot, display))
            stack.callback(self.log_progress)
            for batch in answers(
                self._source,
                self.renderer,
                self.engine,
                self.encoder,
                done=lambda position: not todo[position],
                skip=self._skip,
                directory=self._output.scratch,
            ):
                self._take(batch)
        self._output.manifest.replaced_surrogates = self._source.replaced_surrogates + self.renderer.replaced_surrogates

    def snapshot(self) -> Any:
        return self._meter.snapshot(self.engine.statistics)

    def _take(self, batch: pa.RecordBatch) -> None:
        codes = codes_of(batch.column(f"{self._prefix}finish_reason"))
        usage = batch.column(f"{self._prefix}usage")
        prompt, output = (pc.sum(pc.struct_field(usage, name)).as_py() or 0 for name in _TOKENS)
        self._record(batch.column("position"), codes, batch.columns[1:])
        self._meter.finished(len(codes), prompt, output)
        self._note_errors(batch.column(f"{self._prefix}error"))

    def _skip(self, skipped: Skipped) -> None:
        nothing = [pa.nulls(1, field.type) for field in self.encoder.results]
        self._record(pa.array([skipped.position]), np.array([SKIPPED], np.int8), nothing)
        self._meter.finished(1, 0, 0)

    def _record(self, positions: pa.Array, codes: NDArray[np.int8], columns: list[pa.Array]) -> None:
        rows = pa.RecordBatch.from_arrays([positions, pa.array(codes), *columns], schema=self._schema)
        self._journal.put(rows)
        self._output.outcomes.record(positions.to_numpy(), codes)

    def _note_errors(self, errors: pa.Array) -> None:
        if errors.null_count < len(errors):
            last = errors.drop_null()[-1].as_py()
            self._last_error = f"{last['code']}: {last['message']}"
        if time.monotonic() >= self._next_log:
            self._next_log += _LOG_SECONDS
            self.log_progress()

    def log_progress(self) -> None:
        """One event with the figures of the moment and the last failed row's error."""
        snapshot = self.snapshot()
        speed = {name: round(value, 4) for name, value in snapshot.rates.items()}
        self._output.log.write("progress", rows=snapshot.rows_done, speed=speed, error=self._last_error)
        self._last_error = None


_TOKENS = ("prompt_tokens", "completion_tokens")


def resolve_sampling(job: Job, models: Models) -> tuple[Sampling, dict[str, Any]]:
    """The sampling of a row without values of its own. Raises JobError for an illegal value in the model's file."""
    try:
        sampling, origins = resolve_generation(job.generation, models.generation_config(job))
    except ValueError as error:
        raise JobError(f"{job.model.path}: generation_config.json: {error}; set it in the job") from error
    return sampling, dict(origins)


def make_renderer(job: Job, models: Models, sampling: Sampling, tokenizer: Any, date: str) -> Renderer:
    """The renderer of the job's prompts. `date` is the day templates are told, the same over all runs of a job."""
    return Renderer(
        job.prompt,
        sampling,
        {str(key): column for key, column in job.generation.per_row.items()},
        tokenizer,
        models.context_length(job),
        date,
        _chat_template(job),
    )


def _chat_template(job: Job) -> str | None:
    if job.model.chat_template is None:
        return None
    try:
        return Path(job.base / job.model.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{job.source}: model.chat_template: {error}") from error


def resolved_settings(job: Job, sampling: Sampling, origins: dict[str, Any]) -> dict[str, Any]:
    """All sections as they are in force, and where each sampling value comes from."""
    sections = job.model_dump(mode="json", exclude={"generation", "name"})
    generation = {**job.generation.model_dump(mode="json"), **asdict(sampling)}
    return {**sections, "generation": generation, "generation_origins": origins}


def describe_sampling(sampling: Sampling, origins: dict[str, Any]) -> str:
    """One line with every value that is not plainly the default, and where it comes from."""
    shown = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "seed")
    parts = [f"{name} {getattr(sampling, name)} ({origins[name]})" for name in shown]
    more = [f"{name} {getattr(sampling, name)} ({origins[name]})" for name in origins if _is_set(name, shown, origins)]
    return f"sampling: {', '.join([*parts, *more])}"


def _is_set(name: str, shown: tuple[str, ...], origins: dict[str, Any]) -> bool:
    return name not in shown and origins[name] != "default"


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide answers and files."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


__all__ = ["Generation", "LoadedModel", "describe_sampling", "make_renderer", "resolve_sampling", "resolved_settings"]
