"""`batchgen run` between the command line and `run`: options, the question before --fresh, signals, the last line.

Knows the terminal; what a run does is in run.py.
"""

import json
import sys
from dataclasses import dataclass

import click

from .cluster.models import models_on
from .errors import UsageError
from .job import Job
from .models import Models
from .outcomes import parse_retry
from .report import Report
from .run import RunOptions, run
from .stop import Stop
from .times import parse_deadline


@dataclass(frozen=True)
class RunArguments:
    """What the command line says beside the job file; the names are those of its options."""

    limit: int | None = None
    deadline: str | None = None
    fresh: bool = False
    yes: bool = False
    retry: str | None = None
    quiet: bool = False
    log_format: str = "text"
    on: str | None = None
    workers: int | None = None


def run_command(job: Job, given: RunArguments, models: Models | None = None) -> int:
    """Runs the job and returns the exit code. `models` instead of those that `on` and `workers` name."""
    options = RunOptions(fresh=given.fresh, retry=_retry(given.retry), quiet=given.quiet, log_format=given.log_format)
    if given.fresh and not given.yes:
        _ask_before_fresh(job)
    if given.limit is not None:
        job = job.with_limit(given.limit)
    with models_on(given.on, given.workers) as named:
        report = run(job, options, models or named, stop=_stop(given.deadline))
    for warning in report.warnings:
        _warn(warning, given.log_format)
    if not given.quiet:
        _tell(report, given.log_format)
    return report.exit_code


def _retry(text: str | None) -> tuple[int, ...]:
    try:
        return parse_retry(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _stop(deadline: str | None) -> Stop | None:
    if deadline is None:
        return None
    try:
        return Stop(parse_deadline(deadline))
    except ValueError as error:
        raise UsageError(f"--deadline: {error}") from error


def _ask_before_fresh(job: Job) -> None:
    if not job.output_path.exists() or not any(job.output_path.iterdir()):
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{job.output_path}: --fresh throws this output away; confirm with --yes")
    click.confirm(f"Throw away the output in {job.output_path}?", abort=True, err=True)


def _warn(text: str, log_format: str) -> None:
    line = " ".join(text.split()) if log_format == "text" else json.dumps({"event": "warning", "message": text})
    print(line, file=sys.stderr, flush=True)


def _tell(report: Report, log_format: str) -> None:
    line = report.summary() if log_format == "text" else json.dumps({"event": "end", **report.as_json()})
    print(line, file=sys.stderr, flush=True)
