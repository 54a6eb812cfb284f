"""How far the job of an output directory is, read from its manifest, journal, lock and log; changes nothing.

Knows nothing that a run does not write down; a running job is as new as its last journal segment.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .journal import Journal
from .lock import is_held, read_holder
from .log import read_events
from .manifest import Manifest
from .output import SIDECAR, recover_outcomes

_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(frozen=True)
class Status:
    """`state`: running, stopped, failed or finished. `alive`: a process holds the output now."""

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


def read_status(output: Path) -> Status:
    """Raises UsageError when the directory is no output of batchgen."""
    sidecar = output / SIDECAR
    manifest = Manifest.load(sidecar / "manifest.json")
    if manifest is None:
        raise UsageError(f"{output}: no output of batchgen is here")
    journal = Journal(sidecar / "journal", int(manifest.layout["output"]["shard_rows"]))
    counts, tokens = _count(output, manifest, journal)
    holder = read_holder(sidecar / "lock.json")
    alive = holder is not None and is_held(holder)
    done = sum(counts[name] for name in ("stop", "length", "error", "skipped"))
    events = read_events(sidecar / "log.jsonl")
    return Status(
        output=str(output),
        job=manifest.job,
        state=manifest.state if alive or manifest.state != "running" else "killed",
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
        yield f"speed: {', '.join(f'{value:.4g} {name}' for name, value in status.speed.items())}"
    yield f"last error: {status.last_error or 'none'}"
    if status.holder:
        age = time.time() - float(status.holder.get("heartbeat", 0))
        yield f"a run is alive: host {status.holder['host']}, process {status.holder['pid']}, heartbeat {age:.0f} s ago"
    else:
        yield "no run is alive"


def _count(output: Path, manifest: Manifest, journal: Journal) -> tuple[dict[str, int], dict[str, int]]:
    """Rows per outcome, and tokens: of final files by the manifest, of the rest by the journal."""
    outcomes, _ = recover_outcomes(output, manifest, journal, verify=False)
    journaled = journal.usage(f"{manifest.output_settings.prefix}usage")
    return outcomes.counts(), {name: manifest.tokens.get(name, 0) + journaled.get(name, 0) for name in _TOKENS}


def _last(events: list[dict[str, Any]], key: str) -> Any:
    return next((event[key] for event in reversed(events) if event.get(key)), None)
