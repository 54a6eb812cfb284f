"""Windows of requests: the first one small, so that work begins; the next one grows for as long as this one runs.

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
    """How much one window holds at most.

    The first one ends `patience` seconds after its first request. A later one ends when the one before is nearly
    handed out, but holds at least four times as many rows: prefixes are shared within a window, so an engine that is
    slower than reading gets few large ones, and a faster one does not wait for all of the input.
    """

    rows: int = 1_000_000
    tokens: int = 1 << 28  # 1 GiB on disk
    patience: float = 0.25


_GROWTH = 4
_LEFT = 1 / 8  # of a window, while the next one is planned


class _Pace:
    """How far the consumer has come: `low` is the last window that is nearly handed out."""

    def __init__(self) -> None:
        self.low = -1

    def follow(self, number: int, window: Window) -> Iterator[Request]:
        for taken, request in enumerate(window.requests(), 1):
            if window.num_rows - taken <= _LEFT * window.num_rows:
                self.low = number
            yield request


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
        Ahead(_build(requests, Path(place), budget, stop, pace := _Pace()), 1, stop) as windows,
    ):
        for number, window in enumerate(windows):
            yield pace.follow(number, window)


def _build(
    requests: Iterable[Request], place: Path, budget: WindowBudget, stop: threading.Event, pace: _Pace
) -> Iterator[Window]:
    number, smallest, deadline = 0, 1, float("inf")
    writer = WindowWriter(place, "0")
    for request in requests:
        if stop.is_set():
            return
        writer.add(request)
        if number == 0 and writer.num_rows == 1:
            deadline = time.monotonic() + budget.patience
        wanted = pace.low >= number - 1 if number else time.monotonic() > deadline
        if _is_full(writer, budget) or (wanted and writer.num_rows >= smallest):
            number, smallest = number + 1, _GROWTH * writer.num_rows
            yield writer.finish()
            writer = WindowWriter(place, str(number))
    if writer.num_rows:
        yield writer.finish()


def _is_full(writer: WindowWriter, budget: WindowBudget) -> bool:
    return writer.num_rows >= budget.rows or writer.num_tokens >= budget.tokens
