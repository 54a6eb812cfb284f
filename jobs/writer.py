"""Takes finished rows from the step loop and journals them in a thread of its own.

Knows when a segment is due; a failure here is raised at the next call, and nothing is accepted after it.
"""

import queue
import threading
import time
from typing import Self

import pyarrow as pa

from .journal import Journal

_MAX_WAITING = 64  # record batches between the step loop and the disk
_MAX_BYTES = 64 << 20  # a segment is closed early at this size
_BATCH_BYTES = 16 << 10  # what a record batch takes beside its values


class JournalWriter:
    """Rows put here are on disk at most `checkpoint_seconds` later, and all of them after `close`."""

    def __init__(self, journal: Journal, checkpoint_seconds: float) -> None:
        self._journal = journal
        self._seconds = checkpoint_seconds
        self._queue: queue.Queue[pa.RecordBatch | None] = queue.Queue(_MAX_WAITING)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, rows: pa.RecordBatch) -> None:
        """Hands rows over; waits when the disk cannot follow. Raises what went wrong in the thread."""
        while True:
            self.check()
            try:
                self._queue.put(rows, timeout=0.1)
            except queue.Full:
                continue
            return

    def check(self) -> None:
        """Raises what went wrong in the thread."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Writes what is left. Raises what went wrong in the thread."""
        if self._thread.is_alive():
            self._drain_into_end()
        self._thread.join()
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drain_into_end(self) -> None:
        while self._failure is None:
            try:
                self._queue.put(None, timeout=0.1)
            except queue.Full:
                continue
            return

    def _run(self) -> None:
        try:
            while self._segment():
                pass
        except BaseException as error:
            self._failure = error

    def _segment(self) -> bool:
        """Gathers and writes one segment; False after the last."""
        rows, size, due, more = [], 0, float("inf"), True
        while more and size < _MAX_BYTES and time.monotonic() < due:
            try:
                batch = self._queue.get(timeout=None if due == float("inf") else max(0.0, due - time.monotonic()))
            except queue.Empty:
                break
            if batch is None:
                more = False
            elif batch.num_rows:
                due = min(due, time.monotonic() + self._seconds)
                rows.append(batch)
                size += batch.nbytes + _BATCH_BYTES
        if rows:
            self._journal.append(pa.Table.from_batches(rows))
        return more
