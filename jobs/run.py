"""The flow of a job: open the output, read, generate what is not done, publish.

Composed from the pipeline, the engine and the output; each of them decides its own matters.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from batchgen.pipeline.rows import Source
from batchgen.pipeline.source import open_source

from .check import check_columns, check_files, check_model, relevant_columns, require_writable_columns
from .failure import explain_failure
from .fingerprint import identity_of
from .formats import describe_formats
from .generate import Generation
from .hook import HookError, make_hook
from .job import Job
from .metrics import open_metrics
from .models import Models
from .output import Output, open_output
from .progress import choose_display
from .publish import publish
from .report import Report
from .resolved import describe_engine, describe_sampling
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
    check_model(job, session.models)
    with announcing(session), session.stop.listening(), open_output(job, session.options.fresh) as output:
        try:
            with output.failing():
                session.work(output)
        except Stopped:
            session.stopped = session.stop.reason
            output.settle("stopped", reason=session.stopped)
        session.outcome = session.report(output)
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
    output: Output | None = None  # once it is this job's and there is something to do
    outcome: Report = field(init=False)
    began: float = field(default_factory=time.monotonic)

    def work(self, output: Output) -> None:
        """All of it. It may end early until the commit begins; from there on it goes through to the end."""
        self.stop.check()
        output.claim(identity_of(self.job, self.models), self.options.retry)
        source = self._open_source(output)
        self.stop.check()
        todo = self._todo(output)
        if todo.any() or not output.is_settled:
            self.output = output
        if todo.any():
            self._generate(output, source, todo)
        if not output.is_settled:
            publish(self.job, output, source, self.stop)
        output.tidy()

    def _open_source(self, output: Output) -> Source:
        limit = output.row_limit(self.job.input.limit)
        settings = self.job.input.model_copy(update={"limit": limit})
        known, schema = output.manifest.files, output.manifest.schema
        source = open_source(settings, self.job.base, known, schema, relevant_columns(self.job))
        check_columns(self.job, source.schema)
        output.attach(source)
        output.pass_over(source.repeated)
        for place in source.unfinished:
            self._note(output, place)
        return source

    def _note(self, output: Output, place: str) -> None:
        output.log.write("unfinished_line", place=place)
        if not self.options.quiet and self.options.log_format == "text":
            print(f"{place}: is still being written and no row yet", file=sys.stderr, flush=True)

    def _todo(self, output: Output) -> NDArray[np.bool_]:
        """True for the rows this run is to generate."""
        mask = output.outcomes.open_mask(self.options.retry)
        if self.job.input.limit is not None:
            mask[self.job.input.limit :] = False
        return mask

    def _generate(self, output: Output, source: Source, todo: NDArray[np.bool_]) -> None:
        require_writable_columns(self.job, source.schema)
        self.rows_asked = int(todo.sum())
        output.log.write("started", rows=self.rows_asked)
        metrics = open_metrics(self.job, output.log)
        generation = Generation(self.job, self.models, output, source)
        self.stop.check()
        if not self.options.quiet and self.options.log_format == "text":
            print(f"loading {self.job.model.path}", file=sys.stderr, flush=True)
        generation.load()
        self.stop.check()
        if not self.options.quiet:
            self._tell(generation)
        displays = [choose_display(self.options.quiet, self.options.log_format), *metrics]
        generation.run(todo, displays, self.stop.is_due)
        self.first_error = generation.first_error
        self.stop.check()

    def _tell(self, generation: Generation) -> None:
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
            for line in [*describe_formats(generation.formats), describe_engine(generation.engine.resolved)]:
                print(line, file=sys.stderr)
            print(describe_sampling(generation.sampling, generation.origins), file=sys.stderr)
            if self.job.prompt.reorder:
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

    def report(self, output: Output) -> Report:
        """What the run came to."""
        counts = output.counts
        allowed = self.job.run.allowed_failures(counts["rows"])
        too_many = self.stopped is None and allowed is not None and counts["error"] > allowed
        return Report(
            output=output.path,
            counts=counts,
            tokens=output.manifest.tokens,
            reuse=output.manifest.reuse,
            seconds=time.monotonic() - self.began,
            asked=self.rows_asked,
            stopped=self.stopped,
            first_error=self.first_error,
            too_many_failures=too_many,
            exit_code=3 if too_many else self.stop.exit_code if self.stopped else 0,
        )
