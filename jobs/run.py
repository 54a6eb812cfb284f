"""The flow of a job: open the output, read, and for each step generate what is not done and publish.

Composed from the pipeline, the engine and the output; each of them decides its own matters.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.pipeline.rows import Source
from batchgen.pipeline.source import open_source

from .check import check_chain, check_files, check_model, relevant_columns, require_writable_columns
from .earlier import EarlierAnswers
from .failure import explain_failure
from .fingerprint import identity_of
from .follow import follow
from .formats import describe_formats
from .generate import Generation
from .hook import HookError, make_hook
from .job import Job
from .manifest import Manifest
from .metrics import open_metrics
from .models import LoadedOnce, Models
from .outcomes import ERROR
from .output import Output, open_outputs
from .progress import choose_display
from .publish import publish, share_reused, total
from .report import Report
from .resolved import describe_engine, describe_sampling
from .same_job import require_same_job
from .stop import Stop, Stopped
from .times import parse_deadline


@dataclass(frozen=True)
class RunOptions:
    """What a single run is asked beside its job. `retry`: outcome codes to ask again."""

    fresh: bool = False
    retry: tuple[int, ...] = ()
    quiet: bool = True
    log_format: str = "text"


def run(job: Job, options: RunOptions | None = None, models: Models | None = None, stop: Stop | None = None) -> Report:
    """Runs a job to its end, or goes on where it was left. Raises JobError, or an error of pipeline or engine.

    A run that `stop` ends early returns a report that says so; finished rows are kept in every case.
    """
    session = Session(job, options or RunOptions(), models or Models(), stop or Stop(_deadline(job)))
    check_files(job)
    for step in job.chain:
        check_model(step, session.models)
    with announcing(session), session.stop.listening(), open_outputs(job, session.options.fresh) as outputs:
        try:
            with outputs[-1].failing():
                session.work(outputs)
        except Stopped:
            session.stopped = session.stop.reason
            for output in dict.fromkeys([session.current or outputs[-1], outputs[-1]]):
                output.settle("stopped", reason=session.stopped)
        session.outcome = session.report(outputs)
    return session.outcome


@contextmanager
def announcing(session: "Session") -> Iterator[None]:
    """Calls `run.on_finish` when the block is left, by an error too."""
    try:
        yield
    except Exception as error:
        message, exit_code = explain_failure(error)
        session.announce(exit_code, message)
        raise
    session.outcome = replace(session.outcome, hook_error=session.announce(session.outcome.exit_code))


def _deadline(job: Job) -> datetime | None:
    return None if job.run.deadline is None else parse_deadline(job.run.deadline)


@dataclass
class Session:
    """One run of a job, from the claimed output to the report."""

    job: Job
    options: RunOptions
    models: Models
    stop: Stop
    rows_asked: int = 0
    stopped: str | None = None
    first_error: str | None = None
    current: Output | None = None  # of the step that is at work
    output: Output | None = None  # once it is this job's and there is something to do
    outcome: Report = field(init=False)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._engine = LoadedOnce(self.models)

    def work(self, outputs: list[Output]) -> None:
        """All of it. It may end early until the last commit begins; from there on it goes through to the end."""
        self.stop.check()
        self._claim(outputs)
        source = self._open_source(outputs)
        self.stop.check()
        for output, rows in zip(outputs, self._attach(outputs, source), strict=True):
            self.current = output
            with nullcontext() if output is outputs[-1] else output.failing():
                self._step(output, rows, outputs[-1])

    def _claim(self, outputs: list[Output]) -> None:
        identities = [identity_of(output.job, self.models) for output in outputs]
        stored = [Manifest.load(output.sidecar / "manifest.json") for output in outputs]
        jobs = [output.job for output in outputs]
        if stored[-1] is not None:  # without it the rest is nobody's, and cleared with the first claim
            require_same_job(list(zip(jobs, identities, stored, strict=True)), self.options.retry)
        for output, identity in reversed(list(zip(outputs, identities, strict=True))):
            output.claim(identity, self.options.retry)

    def _open_source(self, outputs: list[Output]) -> Source:
        """The input, whose rows keep the places that the first step gave them."""
        manifest = outputs[0].manifest
        limit = outputs[0].row_limit(self.job.input.limit)
        settings = self.job.input.model_copy(update={"limit": limit})
        source = open_source(settings, self.job.base, manifest.files, manifest.schema, relevant_columns(self.job))
        check_chain(self.job, source.schema)
        return source

    def _attach(self, outputs: list[Output], source: Source) -> list[Source]:
        """What each step reads; the output itself comes first, so that it is known whose the others are."""
        sources: list[Source] = [source]
        for at, output in enumerate(outputs[1:], 1):
            limit = output.row_limit(self.job.input.limit)
            num_rows = source.num_rows if limit is None else min(limit, source.num_rows)
            sources.append(EarlierAnswers(source, outputs[:at], num_rows))
        for output, rows in reversed(list(zip(outputs, sources, strict=True))):
            output.attach(rows)
            output.pass_over(rows.repeated)
            for place in rows.unfinished:
                self._note(output, place)
        return sources

    def _note(self, output: Output, place: str) -> None:
        output.log.write("unfinished_line", place=place)
        if not self.options.quiet and self.options.log_format == "text":
            print(f"{place}: is still being written and no row yet", file=sys.stderr, flush=True)

    def _step(self, output: Output, source: Source, last: Output) -> None:
        """Generates and publishes what is missing of one step."""
        output.begin()
        if isinstance(source, EarlierAnswers):
            self._follow(output, source, last)
        todo = self._todo(output)
        if todo.any() or not output.is_settled:
            self.output = last
        if todo.any():
            self._generate(output, source, todo)
        if not output.is_settled:
            publish(output.job, output, source, self.stop)
        output.rest()
        output.tidy()

    def _follow(self, output: Output, source: EarlierAnswers, last: Output) -> None:
        follow(output, source)
        before = source.earlier[-1].manifest
        output.manifest.formats = output.manifest.formats or before.formats
        if output is last:
            output.beside = source.publications
            output.manifest.steps = [_summary(earlier) for earlier in source.earlier]

    def _todo(self, output: Output) -> NDArray[np.bool_]:
        """True for the rows this run is to generate."""
        mask = output.outcomes.open_mask(self.options.retry)
        if self.job.input.limit is not None:
            mask[self.job.input.limit :] = False
        return mask

    def _generate(self, output: Output, source: Source, todo: NDArray[np.bool_]) -> None:
        job = output.job
        require_writable_columns(job, source.schema)
        self.rows_asked += int(todo.sum())
        output.log.write("started", rows=int(todo.sum()))
        metrics = open_metrics(job, output.log)
        generation = Generation(job, self.models, output, source)
        self.stop.check()
        if not self.options.quiet and self.options.log_format == "text":
            step = [] if job.step is None else [str(job.step)]
            loading = [] if self._engine.is_loaded else [f"loading {job.model.path}"]
            print(*step, *loading, sep=": ", file=sys.stderr, flush=True)
        known = self._engine.is_loaded
        generation.load(self._engine, int(todo.sum()))
        self.stop.check()
        if not self.options.quiet:
            self._tell(job, generation, known)
        displays = [choose_display(self.options.quiet, self.options.log_format, step=job.step), *metrics]
        generation.run(todo, displays, self.stop.is_due)
        self.first_error = self.first_error or generation.first_error
        self.stop.check()

    def _tell(self, job: Job, generation: Generation, known: bool) -> None:
        """The settings of a step; those of the engine once, when it was loaded."""
        if self.options.log_format == "json":
            resolved = dict(generation.engine.resolved)
            settings = {
                "sampling": asdict(generation.sampling),
                "origins": generation.origins,
                "engine": resolved,
                "formats": generation.formats,
                "prompt_order": generation.arrangement.orders,
            }
            print(json.dumps({"event": "settings", **settings}), file=sys.stderr)
        else:
            engine = [*describe_formats(generation.formats), describe_engine(generation.engine.resolved)]
            for line in [] if known else engine:
                print(line, file=sys.stderr)
            print(describe_sampling(generation.sampling, generation.origins), file=sys.stderr)
            if job.prompt.reorder:
                print(generation.arrangement.describe(), file=sys.stderr)

    def announce(self, exit_code: int, error: str | None = None) -> str | None:
        """Hands the manifest to `run.on_finish` and tells what went wrong with that.

        A run that found nothing to do, or that somebody ended by a signal, is no news.
        """
        if self.output is None or self.stopped in ("interrupted", "terminated"):
            return None
        output = self.output
        facts = {"output": str(output.path), "exit_code": exit_code, "error": error}
        try:
            make_hook(self.job.run.on_finish, self.job.base)({**asdict(output.manifest), **facts})
        except HookError as problem:
            output.log.write("hook_failed", reason=str(problem))
            return f"run.on_finish: {problem}"
        return None

    def report(self, outputs: list[Output]) -> Report:
        """What the run came to."""
        output = outputs[-1]
        counts = output.counts
        allowed = self.job.run.allowed_failures(counts["rows"])
        too_many = self.stopped is None and allowed is not None and _failed_rows(outputs) > allowed
        manifests = [each.manifest for each in outputs]
        tokens = total(manifest.tokens for manifest in manifests)
        return Report(
            output=output.path,
            counts=counts,
            steps={each.job.step.name: each.counts for each in outputs if each.job.step is not None},
            tokens=tokens,
            reuse=share_reused(tokens),
            seconds=time.monotonic() - self.began,
            asked=self.rows_asked,
            stopped=self.stopped,
            step=self._stopped_step,
            first_error=self.first_error,
            too_many_failures=too_many,
            exit_code=3 if too_many else self.stop.exit_code if self.stopped else 0,
        )

    @property
    def _stopped_step(self) -> str | None:
        step = None if self.current is None else self.current.job.step
        return str(step) if self.stopped and step is not None else None


def _summary(output: Output) -> dict[str, Any]:
    """What the manifest of a job with steps says about one that is not the last."""
    manifest = output.manifest
    return {
        "name": manifest.step_name,
        "counts": output.counts,
        "tokens": manifest.tokens,
        "reuse": manifest.reuse,
    }


def _failed_rows(outputs: list[Output]) -> int:
    """Rows that failed in any step."""
    if len(outputs) == 1:
        return outputs[0].counts["error"]
    failed = [output.outcomes.positions(ERROR) for output in outputs]
    return len(np.unique(np.concatenate(failed)))
