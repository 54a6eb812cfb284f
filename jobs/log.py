"""Events of an output's runs, one JSON object a line, in a file that stays small.

Knows when and what; not how a terminal shows it.
"""

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from batchgen.pipeline.place import AnyPath, RemotePath

_MAX_BYTES = 8 << 20  # the older half is moved aside when a log grows beyond this
_STORE_EVENTS = 1000


class EventLog(Protocol):
    """Where events are appended."""

    def write(self, event: str, **values: Any) -> None:
        """One line `{"time", "event", ...}`; values must be JSON values."""
        ...


class FileLog:
    """Appends events to a file of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **values: Any) -> None:
        self._keep_small()
        with open(self._path, "ab") as file:
            file.write(_line(event, values))

    def _keep_small(self) -> None:
        if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
            os.replace(self._path, self._path.with_suffix(".old.jsonl"))


class StoreLog:
    """The last events in an object that is put anew for each: a store appends nothing."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._lines: deque[bytes] | None = None

    def write(self, event: str, **values: Any) -> None:
        if self._lines is None:
            earlier = self._path.read_bytes() if self._path.exists() else b""
            self._lines = deque(earlier.splitlines(keepends=True), maxlen=_STORE_EVENTS)
        self._lines.append(_line(event, values))
        self._path.write_bytes(b"".join(self._lines))


def open_log(path: AnyPath) -> EventLog:
    """The log of an output."""
    return StoreLog(path) if isinstance(path, RemotePath) else FileLog(path)


def _line(event: str, values: dict[str, Any]) -> bytes:
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values}, ensure_ascii=False)
    return line.encode("utf-8", "replace") + b"\n"


def read_events(path: AnyPath, last: int = 1000) -> list[dict[str, Any]]:
    """The last events of a log; lines that a kill cut short are left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        lines = deque(file, maxlen=last)
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
