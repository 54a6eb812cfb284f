"""A generator run in a thread ahead of its consumer, by a bounded weight of items.

Knows nothing of what the items are. Errors of the thread are raised in the consumer; leaving the block ends the thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 10.0
_POLL_SECONDS = 0.1


class _End:
    """Comes behind the last item, with the error that ended the thread, if one did."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Ahead(Generic[T]):
    """Items are made before they are taken until those waiting weigh `bound`; each counts 1, or its `weight`.

    `stop` ends both sides early: the producer between two items, and iteration without what is not made yet. Between
    the threads stand only queues that hold no lock while their caller runs, so neither can be left locked.
    """

    def __init__(
        self,
        items: Iterable[T],
        bound: int,
        stop: threading.Event | None = None,
        weight: Callable[[T], int] = lambda item: 1,
    ) -> None:
        self._items = items
        self._bound = bound
        self._weight = weight
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stop = stop or threading.Event()  # of others too, so never set here
        self._left = False
        self._running = True
        self._thread = threading.Thread(target=self._work, daemon=True, name="batchgen-ahead")

    @property
    def running(self) -> bool:
        """Whether the producer has not come to its end yet."""
        return self._running

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = True
        self._taken.put(self._bound)
        self._thread.join(_JOIN_SECONDS)

    def __iter__(self) -> Iterator[T]:
        while not self._stop.is_set():
            batch, end = self._gather(1, _POLL_SECONDS)
            yield from batch
            if end is not None:
                return self._finish(end)
        return None

    def batches(self, weight: int, seconds: float) -> Iterator[list[T]]:
        """Lists that end when they weigh so much or after `seconds`, so they may be empty."""
        while True:
            batch, end = self._gather(weight, seconds)
            if batch or end is None:
                yield batch
            if end is not None:
                return self._finish(end)

    def _gather(self, weight: int, seconds: float) -> tuple[list[T], _End | None]:
        deadline = time.monotonic() + seconds
        batch: list[T] = []
        gathered = 0
        while gathered < weight:
            try:
                item = self._made.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(item, _End):
                return batch, item
            batch.append(item)
            gathered += self._weight(item)
        if batch:
            self._taken.put(gathered)
        return batch, None

    def _finish(self, end: _End) -> None:
        if end.error is not None:
            raise end.error

    def _work(self) -> None:
        iterator = iter(self._items)
        room = self._bound
        try:
            while self._wanted():
                if room <= 0:
                    room += self._taken.get()
                    continue
                try:
                    item = next(iterator)
                except StopIteration:
                    break
                self._made.put(item)
                room -= self._weight(item)
            close(iterator)
            self._end(_End())
        except BaseException as error:
            self._end(_End(error))

    def _end(self, end: _End) -> None:
        self._running = False
        self._made.put(end)

    def _wanted(self) -> bool:
        return not (self._left or self._stop.is_set())


def close(iterator: Iterator[Any]) -> None:
    """Ends a generator early; an iterator without an end of its own is left alone."""
    if hasattr(iterator, "close"):
        iterator.close()
