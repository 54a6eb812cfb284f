"""A generator run in a thread ahead of its consumer, by a bounded number of items.

Knows nothing of what the items are. Errors of the thread are raised in the consumer; leaving the block ends the thread.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 30.0


class _End:
    """Comes behind the last item, with the error that ended the thread, if one did."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Ahead(Generic[T]):
    """At most `depth` items are made before they are taken; `stop` tells the producer to end early."""

    def __init__(self, items: Iterable[T], depth: int, stop: threading.Event | None = None) -> None:
        self._items = items
        self._made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._permits = threading.Semaphore(depth)
        self._stop = stop or threading.Event()  # of others too, so never set here
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="batchgen-ahead")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._permits.release()
        self._thread.join(_JOIN_SECONDS)

    def __iter__(self) -> Iterator[T]:
        while not isinstance(item := self._made.get(), _End):
            self._permits.release()
            yield item
        self._finish(item)

    def batches(self, size: int, seconds: float) -> Iterator[list[T]]:
        """Lists of up to `size` items; none waits longer than about `seconds` for more to come."""
        while not isinstance(item := self._made.get(), _End):
            batch, last = self._fill([item], size, seconds)
            self._permits.release(len(batch))
            yield batch
            if last is not None:
                return self._finish(last)
        return self._finish(item)

    def _fill(self, batch: list[T], size: int, seconds: float) -> tuple[list[T], _End | None]:
        deadline = time.monotonic() + seconds
        while len(batch) < size:
            try:
                item = self._made.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(item, _End):
                return batch, item
            batch.append(item)
        return batch, None

    def _finish(self, end: _End) -> None:
        if end.error is not None:
            raise end.error

    def _work(self) -> None:
        iterator = iter(self._items)
        try:
            while self._permits.acquire() and not (self._left.is_set() or self._stop.is_set()):
                try:
                    self._made.put(next(iterator))
                except StopIteration:
                    break
            close(iterator)
            self._made.put(_End())
        except BaseException as error:
            self._made.put(_End(error))


def close(iterator: Iterator[Any]) -> None:
    """Ends a generator early; an iterator without an end of its own is left alone."""
    if hasattr(iterator, "close"):
        iterator.close()
