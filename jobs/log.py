"""Events of an output's runs, one JSON object a line, in a file that stays small.

Knows when and what; not how a terminal shows it.
"""

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

_MAX_BYTES = 8 << 20  # the older half is moved aside when a log grows beyond this


class EventLog:
    """Appends events to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **values: Any) -> None:
        """One line `{"time", "event", ...}`; values must be JSON values."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **values}, ensure_ascii=False)
        self._keep_small()
        with open(self._path, "ab") as file:
            file.write(line.encode("utf-8", "replace") + b"\n")

    def _keep_small(self) -> None:
        if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
            os.replace(self._path, self._path.with_suffix(".old.jsonl"))


def read_events(path: Path, last: int = 1000) -> list[dict[str, Any]]:
    """The last events of a log; lines that a kill cut short are left out."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        lines = deque(file, maxlen=last)
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
