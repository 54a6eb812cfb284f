"""Generates the open rows of a job: model, renderer and encoder are put together here, and answers journaled.

Knows the order in which these parts are made; publishing is not known here.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.engine.options import Chosen
from batchgen.engine.request import Request, Sampling
from batchgen.pipeline.config import RequestPrompts
from batchgen.pipeline.flow import Generator as RowGenerator
from batchgen.pipeline.flow import answers, require_columns
from batchgen.pipeline.openai_prompt import RequestRenderer
from batchgen.pipeline.prompt import Renderer
from batchgen.pipeline.result import RESULT_COLUMNS, ResultEncoder
from batchgen.pipeline.retries import Retrying
from batchgen.pipeline.rows import Skipped, Source
from batchgen.pipeline.templates import TemplateError

from .choices import Adaptation, Situation, as_taken, limits_of, measured, record, with_choices
from .columns import result_columns
from .errors import UsageError
from .finish import journal_schema
from .formats import Work, first_requests, settle_formats, with_formats
from .job import Job
from .models import LoadedModel, LoadedOnce, Models
from .ordering import arranged
from .outcomes import SKIPPED, codes_of
from .output import Output
from .prefix_groups import PrefixGroups, Watched, describe, merged
from .progress import Display, Meter, Progress
from .resolved import (
    chat_template,
    installed_versions,
    require_grammar,
    require_known_tokens,
    resolve_sampling,
    resolved_settings,
)
from .writer import JournalWriter

_LOG_SECONDS = 1.0, 30.0  # between the first two events, and at most
_TOKENS = ("prompt_tokens", "completion_tokens")


class Generation:
    """One pass over the rows that are open, journaling every outcome.

    Making it finds what the tokenizer and the prompt section have against each other; `load` loads the model.
    """

    engine: LoadedModel

    def __init__(self, job: Job, models: Models, output: Output, source: Source) -> None:
        self._job = job
        self._models = models
        self._output = output
        self._source = source
        self.sampling, self.origins = resolve_sampling(job, models)
        tokenizer = self._tokenizer = models.tokenizer(job)
        require_known_tokens(job, self.sampling, tokenizer.size)
        require_grammar(job, self.sampling, models, tokenizer)
        self._written, self.arrangement = arranged(job, source, output.manifest.prompt_order)
        if job.prompt.reorder:
            output.manifest.prompt_order = asdict(self.arrangement)
            output.save()
        self.renderer = make_renderer(self._written, models, self.sampling, tokenizer, output.manifest.template_date)
        require_columns(self.renderer, source.schema)
        self._prefix = job.output.prefix
        self._last_error: str | None = None
        self._first_error: tuple[int, str] | None = None
        self._log_pause = _LOG_SECONDS[0]
        self._next_log = time.monotonic() + self._log_pause

    def load(self, loaded: LoadedOnce, num_rows: int) -> None:
        """Loads the model unless it is there, and stores in the manifest what this run resolved to.

        `num_rows`: how many it will ask; for what they are worth measurements are made.
        """
        work = Work(num_rows, self.sampling.max_tokens * self.sampling.n)
        first = list(self._first_requests())
        situation = Situation.of(self._job, self._models, first, num_rows)
        stored = self._output.manifest.formats
        self.formats = settle_formats(
            self._job, self._models, stored, lambda: [row.prompt for row in first], work, situation.shares
        )
        wanted = situation.choose(self.formats)
        situation.require_room(wanted.settings)
        self.engine = loaded.engine(with_choices(with_formats(self._job, self.formats), wanted))
        self.situation, self.chosen = situation, as_taken(situation, wanted, self.engine.resolved)
        self.engine.prepare(self.chosen.predicted.kv_tokens)
        eos_ids, results = self.engine.bounds.eos_ids, result_columns(self._job)
        text = self.engine.tokenizer
        self.encoder = ResultEncoder(text, self.sampling, eos_ids, results=results, parser=self._job.parser())
        self._schema = journal_schema(self.encoder.results)
        self._output.describe(
            settings={
                **resolved_settings(self._job, self.sampling, self.origins),
                "resolved_engine": dict(self.engine.resolved),
            },
            formats=self.formats,
            choices=record(situation, self.chosen),
            model={"path": self._job.model.path, "digest": self._output.manifest.identity["model"]["digest"]},
            tokenizer={"path": self._job.tokenizer_path, "digest": self.engine.tokenizer.digest()},
            versions=installed_versions(),
        )

    def _first_requests(self) -> Iterable[Request]:
        """By a renderer of their own: this one counts what it renders."""
        date = self._output.manifest.template_date
        renderer = make_renderer(self._written, self._models, self.sampling, self._tokenizer, date)
        return first_requests(self._source, renderer)

    def run(self, todo: NDArray[np.bool_], displays: Sequence[Display], stopping: Callable[[], bool]) -> None:
        """Asks every row where `todo` is true until `stopping`. What has finished when this ends is journaled."""
        self._meter = Meter(int(todo.sum()), self.engine.statistics)
        self._adaptation = Adaptation(self.situation, self.chosen, self.formats, int(todo.sum()))
        self._groups = PrefixGroups()
        with ExitStack() as stack:
            writer = JournalWriter(self._output.journal, self._job.run.checkpoint_seconds)
            self._journal = stack.enter_context(writer)
            for display in displays:
                stack.enter_context(Progress(self.snapshot, display))
            stack.callback(self._conclude)
            for batch in stack.enter_context(closing(self._answers(todo, stopping))):
                self._take(batch)
        groups = describe(self._groups.largest, self.engine.tokenizer)
        self._output.manifest.prefix_groups = merged(self._output.manifest.prefix_groups, groups)
        snapshot = self.snapshot()
        self._output.manifest.speculation = snapshot.speculation
        if self._output.manifest.choices:
            steps, seconds = snapshot.speculation["steps"], snapshot.seconds - snapshot.host_wait
            self._output.manifest.choices["measured"] = measured(seconds, steps, snapshot.fed_tokens)
        self._output.manifest.replaced_surrogates = self._source.replaced_surrogates + self.renderer.replaced_surrogates

    def _conclude(self) -> None:
        self._output.host_wait_seconds = self.snapshot().host_wait
        self.log_progress()

    def _answers(self, todo: NDArray[np.bool_], stopping: Callable[[], bool]) -> Generator[pa.RecordBatch, None, None]:
        yield from answers(
            self._source,
            self.renderer,
            Watched(self._asked_again(), self._groups),
            self.encoder,
            done=lambda position: not todo[position],
            skip=self._skip,
            directory=self._output.scratch,
            stopping=stopping,
        )

    def _asked_again(self) -> RowGenerator:
        """The engine, or the engine behind the retries of the job."""
        retries = self._job.run.retries
        return Retrying(self.engine, retries, self.encoder.is_whole) if retries else self.engine

    def snapshot(self) -> Any:
        return self._meter.snapshot(self.engine.statistics)

    def _take(self, batch: pa.RecordBatch) -> None:
        """Journals what has finished; nothing may have."""
        self._journal.check()
        if batch.num_rows:
            codes = codes_of(batch.column(f"{self._prefix}finish_reason"))
            usage = batch.column(f"{self._prefix}usage")
            prompt, output = (pc.sum(pc.struct_field(usage, name)).as_py() or 0 for name in _TOKENS)
            self._record(batch.column("position"), codes, batch.columns[1:])
            self._meter.finished(len(codes), prompt, output)
            self._adapt(self._adaptation.finished(len(codes), output))
            self._note_errors(batch.column("position"), batch.column(f"{self._prefix}error"))
        if time.monotonic() >= self._next_log:
            self._log_pause = min(1.2 * self._log_pause, _LOG_SECONDS[1])
            self._next_log += self._log_pause
            self.log_progress()

    def _adapt(self, asked: Chosen | None) -> None:
        """Hands changed limits to the engine that runs, and tells what it made of them."""
        if asked is None:
            return
        before = self._adaptation.chosen
        self._hand_over(asked)
        if self._adaptation.loses(limits_of(self.engine.resolved)):
            self._hand_over(before)  # the engine kept to a part of it that is worse than none
        change = self._adaptation.took(limits_of(self.engine.resolved))
        if change is not None:
            self._output.manifest.choices.setdefault("adapted", []).append(change)
            self._output.log.write("adapted", **change)

    def _hand_over(self, chosen: Chosen) -> None:
        self.engine.adopt(with_choices(with_formats(self._job, self.formats), chosen).engine)

    def _skip(self, skipped: list[Skipped]) -> None:
        nothing = [pa.nulls(len(skipped), field.type) for field in self.encoder.results]
        positions = pa.array([row.position for row in skipped], pa.int64())
        self._record(positions, np.full(len(skipped), SKIPPED, np.int8), nothing)
        self._meter.finished(len(skipped), 0, 0)

    def _record(self, positions: pa.Array, codes: NDArray[np.int8], columns: list[pa.Array]) -> None:
        rows = pa.RecordBatch.from_arrays([positions, pa.array(codes), *columns], schema=self._schema)
        self._journal.put(rows)
        self._output.outcomes.record(positions.to_numpy(), codes)

    @property
    def first_error(self) -> str | None:
        """The error of the first failed row, by position."""
        return None if self._first_error is None else self._first_error[1]

    def _note_errors(self, positions: pa.Array, errors: pa.Array) -> None:
        if errors.null_count == len(errors):
            return
        self._last_error = _in_words(errors.drop_null()[-1])
        failed = positions.filter(errors.is_valid())
        first = pc.min(failed).as_py()
        if self._first_error is None or first < self._first_error[0]:
            self._first_error = first, _in_words(errors[pc.index(positions, first).as_py()])

    def log_progress(self) -> None:
        """One event with the figures of the moment and the last failed row's error."""
        snapshot = self.snapshot()
        speed = {name: round(value, 4) for name, value in snapshot.rates.items()}
        tokens = {
            "computed": snapshot.computed_tokens,
            "reused": snapshot.reused_tokens,
            "output": snapshot.output_tokens,
        }
        self._output.log.write(
            "progress",
            seconds=round(snapshot.seconds, 3),
            rows=snapshot.rows_done,
            tokens=tokens,
            speed=speed,
            speculation=snapshot.speculation,
            error=self._last_error,
        )
        self._last_error = None


def _in_words(error: pa.Scalar) -> str:
    return f"{error['code']}: {error['message']}"


def make_renderer(job: Job, models: Models, sampling: Sampling, tokenizer: Any, date: str) -> Renderer:
    """The renderer of the job's prompts. `date` is the day templates are told, the same over all runs of a job.

    Raises UsageError when a template is bad or does not go with the model.
    """
    context = models.context_length(job)
    per_row = {str(key): column for key, column in job.generation.per_row.items()}
    arguments = (job.prompt, sampling, per_row, tokenizer, context, date, chat_template(job))
    if isinstance(job.prompt, RequestPrompts):
        results = result_columns(job)
        lists, logprobs = pa.types.is_list(results.field(0).type), len(results) > len(RESULT_COLUMNS)
        return RequestRenderer(*arguments, lists=lists, logprobs=logprobs)
    try:
        return Renderer(*arguments)
    except TemplateError as error:
        raise UsageError(f"{job.source}: {error}") from error
