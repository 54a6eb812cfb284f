"""Windows of requests: as many at a time as a budget holds, the next one prepared while this one runs.

Knows budgets and threads; how a window is stored is in store.py, how it is ordered in engine/plan.py.
"""

import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from batchgen.engine.request import Request

from .background import Ahead
from .store import Window, WindowWriter


@dataclass(frozen=True, slots=True)
class WindowBudget:
    """How much one window holds; the first one also ends after `patience` seconds, so that work begins."""

    rows: int = 1_000_000
    tokens: int = 1 << 28  # 1 GiB on disk
    patience: float = 2.0


def plan_windows(
    requests: Iterable[Request],
    directory: Path | None,
    budget: WindowBudget,
    stop: threading.Event | None = None,
) -> Iterator[Iterator[Request]]:
    """The requests window by window, each in the order that shares most.

    Reads `requests` in a thread, one window ahead; its errors are raised here. `stop` ends it between two requests.
    Files are kept in a directory inside `directory` (default: the system's) and removed when the iterator ends.
    """
    stop = stop or threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="window-", dir=directory) as place,
        Ahead(_build(requests, Path(place), budget, stop), 1, stop) as windows,
    ):
        for window in windows:
            yield window.requests()


def _build(requests: Iterable[Request], place: Path, budget: WindowBudget, stop: threading.Event) -> Iterator[Window]:
    number, writer = 0, WindowWriter(place, "0")
    deadline = time.monotonic() + budget.patience
    for request in requests:
        if stop.is_set():
            return
        writer.add(request)
        if _is_full(writer, budget) or (number == 0 and time.monotonic() > deadline):
            yield writer.finish()
            number += 1
            writer = WindowWriter(place, str(number))
    if writer.num_rows:
        yield writer.finish()


def _is_full(writer: WindowWriter, budget: WindowBudget) -> bool:
    return writer.num_rows >= budget.rows or writer.num_tokens >= budget.tokens
