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

_RETRY_SECONDS = 0.5
_SPEEDS = {
    "rows_per_second": "rows/s",
    "prompt_tokens_per_second": "prompt tokens/s",
    "output_tokens_per_second": "output tokens/s",
}


@dataclass(frozen=True)
class Status:
    """`state`: running, publishing, stopped, failed, killed or finished. `alive`: a process holds the output now."""

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
    sidecar = output / SIDECAR
    manifest, committing = _manifest(output)
    if committing:
        counts, tokens = manifest.counts, manifest.tokens
    else:
        journal = Journal(sidecar / "journal", int(manifest.layout["output"]["shard_rows"]))
        counts, tokens = _count(output, manifest, journal)
    holder = read_holder(sidecar / "lock.json")
    alive = holder is not None and is_held(holder)
    done = sum(counts[name] for name in ("stop", "length", "error", "skipped"))
    events = read_events(sidecar / "log.jsonl")
    return Status(
        output=str(output),
        job=manifest.job,
        state=_state(manifest, alive, committing),
        alive=alive,
        holder=holder if alive else None,
        rows=counts["rows"],
        done=done,
        left=counts["rows"] - done,
        counts=counts,
        tokens=tokens,
        speed=_last(events, "speed") or {},
        last_error=_last(events, "error"),
    )


def describe_status(status: Status) -> Iterator[str]:
    """Lines for people."""
    counts = status.counts
    yield f"{status.output}: job {status.job}, {status.state}"
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


def _last(events: list[dict[str, Any]], key: str) -> Any:
    return next((event[key] for event in reversed(events) if event.get(key)), None)
