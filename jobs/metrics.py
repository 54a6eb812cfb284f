"""The run's figures as a text file that a Prometheus node exporter picks up.

Knows the exposition format; the file is replaced as a whole, so that no scrape sees half of it.
"""

from collections.abc import Iterator

from batchgen.pipeline.place import AnyPath, place

from .errors import UsageError
from .files import write_aside
from .job import Job
from .log import EventLog
from .progress import Snapshot

_HELP = {
    "rows_done": "Rows of this run that have an outcome",
    "rows": "Rows this run set out to generate",
    "tokens": "Tokens of this run by kind",
    "rows_per_second": "Mean over this run",
    "prompt_tokens_per_second": "Mean over this run, reused tokens included",
    "output_tokens_per_second": "Mean over this run",
    "reuse": "Share of prompt tokens that were not computed again",
    "kv_use": "Share of KV blocks in use",
    "host_wait": "Share of the time in which the engine waited for rows to be read, rendered and planned",
    "running": "1 while the run goes on",
}


class MetricsFile:
    """A display that writes `path` every few seconds. A file that cannot be written ends no run: the log tells it."""

    seconds = 10.0

    def __init__(self, path: AnyPath, job: str, log: EventLog, step: str | None = None) -> None:
        self._path = path
        self._log = log
        self._job = job.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._step = "" if step is None else f',step="{step}"'
        self._last: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        self._last = snapshot
        self._try(snapshot, running=1)

    def close(self) -> None:
        if self._last is not None:
            self._try(self._last, running=0)

    def _try(self, snapshot: Snapshot, running: int) -> None:
        try:
            self.write(snapshot, running)
        except OSError as error:
            self._log.write("metrics_failed", path=str(self._path), reason=error.strerror)

    def write(self, snapshot: Snapshot, running: int) -> None:
        """Replaces the file. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with write_aside(self._path) as file:
            file.write("".join(self._lines(snapshot, running)).encode())

    def _lines(self, snapshot: Snapshot, running: int) -> Iterator[str]:
        kinds = {
            "computed": snapshot.computed_tokens,
            "reused": snapshot.reused_tokens,
            "output": snapshot.output_tokens,
        }
        plain = {"rows_done": snapshot.rows_done, "rows": snapshot.rows_total, "running": running, **snapshot.rates}
        for name, text in _HELP.items():
            yield f"# HELP batchgen_{name} {text}\n# TYPE batchgen_{name} gauge\n"
            if name == "tokens":
                yield from (self._sample(name, value, f',kind="{kind}"') for kind, value in kinds.items())
            else:
                yield self._sample(name, plain[name])

    def _sample(self, name: str, value: float, labels: str = "") -> str:
        return f'batchgen_{name}{{job="{self._job}"{self._step}{labels}}} {value:.10g}\n'


def open_metrics(job: Job, log: EventLog) -> list[MetricsFile]:
    """The display of `run.metrics_file`, if there is one. Raises UsageError when the file cannot be written."""
    if job.run.metrics_file is None:
        return []
    metrics = MetricsFile(
        place(job.run.metrics_file, job.base), job.name, log, None if job.step is None else job.step.name
    )
    try:
        metrics.write(Snapshot(0, 0, 0.0, 0, 0, 0, 0, 0.0), running=1)
    except OSError as error:
        path, reason = job.run.metrics_file, error.strerror or error
        raise UsageError(f"{job.source}: run.metrics_file: {path} cannot be written: {reason}") from error
    return [metrics]
