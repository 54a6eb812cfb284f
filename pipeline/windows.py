"""Windows of requests: the first one small, so that work begins; the next one grows for as long as this one runs.

Knows budgets and threads; how a window is stored is in store.py, how it is ordered in engine/plan.py.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchgen.engine.request import Request, Sampling

from .background import Ahead
from .runs import RunSizes
from .store import Window, WindowWriter


@dataclass(frozen=True, slots=True)
class WindowBudget:
    """How much one window holds at most.

    The first one ends `patience` seconds after its first request. A later one ends when the one before is nearly
    handed out, but holds at least four times as many rows: prefixes are shared within a window, so with an engine that
    is slower than reading the second window is all the rest of the input, and a faster one does not wait for all of
    it. `disk`: bytes that a window may take there; None is half of what is free when it begins.
    """

    rows: float = float("inf")
    tokens: float = float("inf")
    patience: float = 0.25
    disk: int | None = None
    sizes: RunSizes = RunSizes()  # noqa: RUF009 frozen


_GROWTH = 4
_LEFT = 1 / 8  # of a window, while the next one is planned
_PLANNERS = 2  # threads


class Pace:
    """How far the consumer has come: `low` is the last window that is nearly handed out.

    `last` is the number of the last window, None while nobody knows it.
    """

    def __init__(self) -> None:
        self.low = -1
        self.last: int | None = None
        self._current: tuple[int, Window] | None = None

    def rest(self) -> Mapping[Sampling, int] | None:
        """What the rows that are not handed out ask for, seeds aside; None until the last window is handed out."""
        if self._current is None or self._current[0] != self.last:
            return None
        return +self._current[1].asks

    def follow(self, number: int, window: Window) -> Generator[Request, None, None]:
        self._current = number, window
        with closing(window.requests()) as requests:
            for taken, request in enumerate(requests, 1):
                if window.num_rows - taken <= _LEFT * window.num_rows:
                    self.low = number
                yield request


def plan_windows(
    requests: Iterable[Request],
    directory: Path | None,
    budget: WindowBudget,
    stop: threading.Event | None = None,
    pace: Pace | None = None,
) -> Generator[Iterator[Request], None, None]:
    """The requests window by window, each in the order that shares most.

    Reads `requests` in a thread, one window ahead; its errors are raised here. `stop` ends it between two requests.
    `pace` is told how far it is. Files are kept in a directory inside `directory` (default: the system's) and removed
    when the iterator ends. Raises StoreError when the disk they are on is full.
    """
    stop, pace = stop or threading.Event(), pace or Pace()
    with (
        tempfile.TemporaryDirectory(prefix="window-", dir=directory) as place,
        planners() as pool,
        Ahead(_build(requests, Desk(Path(place), pool, budget), stop, pace), 1, stop) as windows,
    ):
        for number, window in enumerate(windows):
            with closing(pace.follow(number, window)) as followed:  # its files go before their directory
                yield followed


@contextmanager
def planners() -> Iterator[Executor]:
    """Threads that sort and plan; what they have not begun is dropped at the end."""
    pool = ThreadPoolExecutor(_PLANNERS, thread_name_prefix="batchgen-plan")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass
class Desk:
    """Where windows are written: a directory, threads that sort, and how large a window gets."""

    directory: Path
    pool: Executor
    budget: WindowBudget
    written: int = 0
    disk: float = 0.0

    def open(self) -> WindowWriter:
        """The next window, empty."""
        free = shutil.disk_usage(self.directory).free
        self.disk = free / 2 if self.budget.disk is None else self.budget.disk
        self.written += 1
        return WindowWriter(self.directory, str(self.written - 1), self.pool, self.budget.sizes)

    def is_full(self, writer: WindowWriter) -> bool:
        """Whether the window holds all it may, or the disk has no room for what it holds in memory."""
        if writer.num_rows >= self.budget.rows or writer.num_tokens >= self.budget.tokens:
            return True
        return writer.chunk_is_full and writer.num_bytes > self.disk


def _build(requests: Iterable[Request], desk: Desk, stop: threading.Event, pace: Pace) -> Iterator[Window]:
    number, smallest, deadline = 0, 1, float("inf")
    writer = desk.open()
    for request in requests:
        if stop.is_set():
            return
        writer.add(request)
        if number == 0 and writer.num_rows == 1:
            deadline = time.monotonic() + desk.budget.patience
        wanted = pace.low >= number - 1 if number else time.monotonic() > deadline
        if desk.is_full(writer) or (wanted and writer.num_rows >= smallest):
            number, smallest = number + 1, _GROWTH * writer.num_rows
            yield writer.finish()
            writer = desk.open()
    pace.last = number if writer.num_rows else number - 1
    if writer.num_rows:
        yield writer.finish()
