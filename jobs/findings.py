"""What an output directory tells about its job: rows, tokens, failures, the course of its runs. Changes nothing.

Knows final files, journal and log; how it looks on a page is not known here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchgen.pipeline.place import AnyPath
from batchgen.pipeline.result import result_schema

from .commit import is_committing
from .errors import UsageError
from .finals import read_results
from .journal import POSITION, USAGE, Journal, token_counts
from .log import read_events
from .manifest import Manifest
from .output import SIDECAR, recover_outcomes
from .status import Status, read_status

_EXAMPLES = 3  # of each kind of failure
_MOST_EXPENSIVE = 10
_POINTS = 600  # of a line over time
_RESULTS = ("finish_reason", "usage", "error")


@dataclass(frozen=True)
class Failure:
    """Rows that failed alike, and the first of them: position and message."""

    code: str
    stage: str
    rows: int
    examples: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ExpensiveRow:
    """A row that took many tokens: `computed` prompt tokens were not reused."""

    position: int
    prompt: int
    computed: int
    output: int


@dataclass(frozen=True)
class Moment:
    """A run between two events of its log: rates per second, share of KV blocks in use. `seconds` of work so far."""

    seconds: float
    rows: float
    prompt: float
    output: float
    kv_use: float


@dataclass(frozen=True)
class Findings:
    """Everything that a report shows. Token arrays have one entry per row that has an outcome and is not skipped."""

    status: Status
    manifest: Manifest
    usage: dict[str, NDArray[np.int64]]
    finish_reasons: dict[str, int]
    failures: list[Failure]
    expensive: list[ExpensiveRow]
    course: list[list[Moment]]  # of each run that generated


@dataclass
class _Rows:
    """What is kept of the rows while they pass by."""

    usage: list[dict[str, NDArray[np.int64]]] = field(default_factory=list)
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    def add(self, positions: NDArray[np.int64], columns: dict[str, pa.Array]) -> None:
        self.positions.append(positions)
        self.usage.append(token_counts(columns["usage"]))
        for reason, count in _count_reasons(columns["finish_reason"]).items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        self._add_failures(positions, columns["error"])

    def _add_failures(self, positions: NDArray[np.int64], errors: pa.Array) -> None:
        failed = pa.table([positions, errors], ["position", "error"]).filter(errors.is_valid())
        if not failed.num_rows:
            return
        codes, stages, messages = (
            pc.struct_field(failed.column("error"), name).to_numpy() for name in ("code", "stage", "message")
        )
        kinds, first, counts = np.unique(codes + " " + stages, return_inverse=True, return_counts=True)[0:3]
        for kind, name in enumerate(kinds):
            code, stage = name.split(" ")
            known = self.failures.get(name, Failure(code, stage, 0, ()))
            at = np.flatnonzero(first == kind)[: _EXAMPLES - len(known.examples)]
            found = zip(failed.column("position").to_numpy()[at].tolist(), messages[at], strict=True)
            self.failures[name] = Failure(code, stage, known.rows + int(counts[kind]), (*known.examples, *found))


def read_findings(output: AnyPath) -> Findings:
    """Reads an output whether its job has ended or not. Raises UsageError when the directory is no output."""
    status = read_status(output)
    if is_committing(output / SIDECAR):
        raise UsageError(f"{output}: its final files are being put in place; let `batchgen run` end first")
    manifest = Manifest.load(output / SIDECAR / "manifest.json")
    assert manifest is not None  # the status was read from it
    rows = _Rows()
    for positions, columns in _result_batches(output, manifest):
        rows.add(positions, columns)
    usage = {name: np.concatenate([np.empty(0, np.int64), *(part[name] for part in rows.usage)]) for name in USAGE}
    positions = np.concatenate([np.empty(0, np.int64), *rows.positions])
    return Findings(
        status=status,
        manifest=manifest,
        usage=usage,
        finish_reasons=rows.reasons,
        failures=sorted(rows.failures.values(), key=lambda failure: -failure.rows),
        expensive=_most_expensive(positions, usage),
        course=[_thin(run) for run in _runs(read_events(output / SIDECAR / "log.jsonl", last=100_000))],
    )


def _result_batches(output: AnyPath, manifest: Manifest) -> Iterator[tuple[NDArray[np.int64], dict[str, pa.Array]]]:
    """Positions and result columns: of the final files but for rows asked again since, then of the journal."""
    settings = manifest.output_settings
    names = [f"{settings.prefix}{name}" for name in _RESULTS]
    schema = result_schema(manifest.num_samples, False, settings.prefix)
    schema = pa.schema([schema.field(name) for name in names])
    journal = Journal(output / SIDECAR / "journal", settings.shard_rows)
    recover_outcomes(output, manifest, journal, verify=False)
    latest = _latest(journal, names)
    replaced = latest.column(POSITION).to_numpy() if latest is not None else np.empty(0, np.int64)
    kept = np.setdiff1d(np.arange(manifest.final_rows), np.array(manifest.skipped, np.int64), assume_unique=True)
    start = 0
    for batch in read_results(output, settings, schema) if manifest.final_rows else ():
        positions = kept[start : start + batch.num_rows]
        start += batch.num_rows
        stands = ~np.isin(positions, replaced)
        yield positions[stands], _by_name(batch.filter(pa.array(stands)), names)
    if latest is not None:
        told = latest.filter(latest.column(names[1]).is_valid())  # skipped rows have nothing
        for batch in told.to_batches():
            yield batch.column(POSITION).to_numpy(), _by_name(batch, names)


def _latest(journal: Journal, names: Sequence[str]) -> pa.Table | None:
    """The last journaled outcome of each row; None without any."""
    batches = [batch.select([POSITION, *names]) for shard in sorted(journal.pieces) for batch in journal.rows_of(shard)]
    if not batches:
        return None
    table = pa.Table.from_batches(batches)
    _, last = np.unique(table.column(POSITION).to_numpy()[::-1], return_index=True)
    return table.take(pa.array(table.num_rows - 1 - last))


def _by_name(batch: pa.RecordBatch, names: Sequence[str]) -> dict[str, pa.Array]:
    return {short: batch.column(name) for short, name in zip(_RESULTS, names, strict=True)}


def _count_reasons(column: pa.Array) -> dict[str, int]:
    values = column.flatten() if pa.types.is_nested(column.type) else column
    return {str(item["values"]): int(item["counts"]) for item in values.drop_null().value_counts().to_pylist()}


def _most_expensive(positions: NDArray[np.int64], usage: dict[str, NDArray[np.int64]]) -> list[ExpensiveRow]:
    """The rows with most tokens computed: own prompt tokens and the answer's."""
    computed = usage["prompt_tokens"] - usage["cached_tokens"]
    most = np.argsort(-(computed + usage["completion_tokens"]), kind="stable")[:_MOST_EXPENSIVE]
    return [
        ExpensiveRow(
            int(positions[at]), int(usage["prompt_tokens"][at]), int(computed[at]), int(usage["completion_tokens"][at])
        )
        for at in most
        if computed[at] + usage["completion_tokens"][at] > 0
    ]


def _runs(events: list[dict[str, Any]]) -> Iterator[list[Moment]]:
    """The course of each run, from what its progress events add to each other."""
    run: list[dict[str, Any]] = []
    for event in events:
        if event.get("event") == "started" and run:
            yield _moments(run)
            run = []
        elif event.get("event") == "progress" and "tokens" in event:
            run.append(event)
    if run:
        yield _moments(run)


def _moments(events: list[dict[str, Any]]) -> list[Moment]:
    before = {"seconds": 0.0, "rows": 0, "tokens": {"computed": 0, "reused": 0, "output": 0}}
    moments = []
    for event in events:
        seconds = event["seconds"] - before["seconds"]
        if seconds <= 0:
            continue
        prompt, output = (
            sum(event["tokens"][name] - before["tokens"][name] for name in names)  # type: ignore[index]
            for names in (("computed", "reused"), ("output",))
        )
        rows = event["rows"] - before["rows"]
        kv_use = event["speed"]["kv_use"]
        moments.append(Moment(event["seconds"], rows / seconds, prompt / seconds, output / seconds, kv_use))
        before = event
    return moments


def _thin(moments: list[Moment]) -> list[Moment]:
    """As many as a line can show; the figures of moments that fall together are averaged over their time."""
    if len(moments) <= _POINTS:
        return moments
    starts = [0.0, *(moment.seconds for moment in moments[:-1])]
    spans = np.array([moment.seconds for moment in moments]) - np.array(starts)
    thinned = []
    for part in np.array_split(np.arange(len(moments)), _POINTS):
        total = spans[part].sum()
        means = [
            float(sum(getattr(moments[at], name) * spans[at] for at in part) / total)
            for name in ("rows", "prompt", "output", "kv_use")
        ]
        thinned.append(Moment(moments[part[-1]].seconds, *means))
    return thinned
