"""How far the job of an output directory is, read from its manifest, journal, lock and log; changes nothing.

Knows nothing that a run does not write down; a running job is as new as its last journal segment.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchgen.pipeline.place import AnyPath

from .commit import read_commit
from .errors import JobError, UsageError
from .finals import read_final_usage
from .journal import USAGE, Journal
from .lock import is_held, read_holder
from .log import read_events
from .manifest import Manifest
from .outcomes import OPEN, SKIPPED
from .output import SIDECAR, recover_outcomes
from .steps import directory_of

_RETRY_SECONDS = 0.5
_GOING_ON = ("started", "finished")  # events of a run that show that the one before is no longer in its way
_SPEEDS = {
    "rows_per_second": "rows/s",
    "prompt_tokens_per_second": "prompt tokens/s",
    "output_tokens_per_second": "output tokens/s",
}


@dataclass(frozen=True)
class StepStatus:
    """One step of a job: its state as below, its rows and tokens."""

    name: str
    state: str
    rows: int
    done: int
    left: int
    counts: dict[str, int]
    tokens: dict[str, int]


@dataclass(frozen=True)
class Status:
    """`state`: running, publishing, stopped, failed, killed or finished. `alive`: a process holds the output now.

    Of a job with steps the figures are those of the last one, whose rows have gone through all; `state`, `speed` and
    `last_error` are those of the step that the job is at. An error that a later run cured is none.
    """

    output: str
    job: str
    state: str
    alive: bool
    holder: dict[str, Any] | None
    rows: int
    done: int
    left: int
    counts: dict[str, int]
    tokens: dict[str, int]
    speed: dict[str, float]
    last_error: str | None
    steps: tuple[StepStatus, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def read_status(output: AnyPath) -> Status:
    """Raises UsageError when the directory is no output of batchgen."""
    try:
        return _read(output)
    except UsageError:
        raise
    except (OSError, JobError):  # a live run published, or removed its journal, in the middle of the reading
        time.sleep(_RETRY_SECONDS)
        return _read(output)


def _read(output: AnyPath) -> Status:
    holder = read_holder(output / SIDECAR / "lock.json")
    alive = holder is not None and is_held(holder)
    manifest, last = _read_step(output, alive)
    earlier = [(path, _read_step(path, alive)[1]) for path in _earlier_steps(output, manifest)]
    steps = [*earlier, (output, last)]
    at = next((number for number, (_, step) in enumerate(steps) if step.state != "finished"), len(steps) - 1)
    events = [event for path, _ in steps[: at + 1] for event in read_events(path / SIDECAR / "log.jsonl")]
    return Status(
        output=str(output),
        job=manifest.job,
        state=steps[at][1].state,
        alive=alive,
        holder=holder if alive else None,
        rows=last.rows,
        done=last.done,
        left=last.left,
        counts=last.counts,
        tokens=last.tokens,
        speed=_last(events, "speed") or {},
        last_error=_last_error(events, sum(step.counts["error"] for _, step in steps[: at + 1])),
        steps=tuple(step for _, step in steps) if manifest.step_name else (),
    )


def _earlier_steps(output: AnyPath, manifest: Manifest) -> list[AnyPath]:
    """The directories of the steps before the last, as far as there are any yet."""
    names = manifest.identity.get("step", {}).get("after", [])
    paths = [output / SIDECAR / directory_of(number, name) for number, name in enumerate(names, 1)]
    return [path for path in paths if (path / SIDECAR / "manifest.json").exists()]


def _read_step(output: AnyPath, alive: bool) -> tuple[Manifest, StepStatus]:
    manifest, committing = _manifest(output)
    if committing:
        counts, tokens = manifest.counts, manifest.tokens
    else:
        journal = Journal(output / SIDECAR / "journal", int(manifest.layout["output"]["shard_rows"]))
        counts, tokens = _count(output, manifest, journal)
    done = sum(counts[name] for name in ("stop", "length", "error", "skipped"))
    return manifest, StepStatus(
        name=manifest.step_name or "",
        state=_state(manifest, alive, committing),
        rows=counts["rows"],
        done=done,
        left=counts["rows"] - done,
        counts=counts,
        tokens=tokens,
    )


def describe_status(status: Status) -> Iterator[str]:
    """Lines for people."""
    counts = status.counts
    yield f"{status.output}: job {status.job}, {status.state}"
    for number, step in enumerate(status.steps, 1):
        outcomes = f"{step.counts['error']} failed, {step.counts['skipped']} skipped, {step.left} left"
        yield f"step {number}/{len(status.steps)} {step.name}: {step.done} of {step.rows} done, {outcomes}"
    yield f"rows: {status.done} of {status.rows} done, {counts['error']} failed, {status.left} left"
    yield f"outcomes: {', '.join(f'{counts[name]} {name}' for name in ('stop', 'length', 'error', 'skipped'))}"
    yield f"tokens: {status.tokens['prompt_tokens']} prompt ({status.tokens['cached_tokens']} reused), " + (
        f"{status.tokens['completion_tokens']} output"
    )
    if status.speed:
        yield f"speed: {', '.join(_speed_words(status.speed))}"
    yield f"last error: {status.last_error or 'none'}"
    if status.holder:
        age = time.time() - float(status.holder.get("heartbeat", 0))
        yield f"a run is alive: host {status.holder['host']}, process {status.holder['pid']}, heartbeat {age:.0f} s ago"
    else:
        yield "no run is alive"


def _speed_words(speed: dict[str, float]) -> Iterator[str]:
    for name, unit in _SPEEDS.items():
        if name in speed:
            yield f"{_plain_number(speed[name])} {unit}"
    if "reuse" in speed:
        yield f"{speed['reuse']:.0%} of prompt tokens reused"


def _plain_number(value: float) -> str:
    return f"{value:.{2 if value < 1 else 1 if value < 100 else 0}f}"


def _manifest(output: AnyPath) -> tuple[Manifest, bool]:
    """The manifest, and whether it is that of a commit which has begun and not ended: the files are in between then."""
    commit = read_commit(output / SIDECAR)
    if commit is not None:
        return Manifest.from_record(commit), True
    manifest = Manifest.load(output / SIDECAR / "manifest.json")
    if manifest is None:
        raise UsageError(f"{output}: no output of batchgen is here")
    return manifest, False


def _state(manifest: Manifest, alive: bool, committing: bool) -> str:
    if not alive and (committing or manifest.state == "running"):
        return "killed"
    return "publishing" if committing else manifest.state


def _count(output: AnyPath, manifest: Manifest, journal: Journal) -> tuple[dict[str, int], dict[str, int]]:
    """Rows per outcome, and tokens of each row's last outcome: of final files by the manifest, then by the journal."""
    standing, outcomes, _ = recover_outcomes(output, manifest, journal, verify=False)
    column = f"{manifest.output_settings.prefix}usage"
    positions, journaled = journal.usage(column)
    tokens = {name: manifest.tokens.get(name, 0) + int(journaled[name].sum()) for name in USAGE}
    replaced = positions[positions < manifest.final_rows]
    if replaced.size:
        rows = np.flatnonzero((standing != OPEN) & (standing != SKIPPED))  # position of each final row
        final = read_final_usage(output, manifest.output_settings)
        tokens = {name: tokens[name] - int(final[name][np.isin(rows, replaced)].sum()) for name in USAGE}
    return outcomes.counts(), tokens


def _last_error(events: list[dict[str, Any]], failed_rows: int) -> str | None:
    """What went wrong last: with a run that no other followed, or with a row where any has failed for good."""
    followed = False
    for event in reversed(events):
        followed = followed or event["event"] in _GOING_ON
        stands = failed_rows > 0 if event["event"] == "progress" else not followed
        if event.get("error") and stands:
            return str(event["error"])
    return None


def _last(events: list[dict[str, Any]], key: str) -> Any:
    return next((event[key] for event in reversed(events) if event.get(key)), None)
