"""One live run per output: a lock file with owner and heartbeat, taken over when the owner is dead.

Looking and taking happen under a file lock that the kernel drops when its holder dies, so two takers cannot both win.
"""

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from .errors import JobError, OutputBusyError
from .files import read_json, write_json
from .owner import describe, is_alive

HEARTBEAT_SECONDS = 5.0
PATIENCE_SECONDS = 60.0  # how old the heartbeat of a run on another machine may be


class Lock:
    """Holds `path` until `release`; raises OutputBusyError when another live run holds it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record = {**describe(), "token": uuid.uuid4().hex}
        self._released = threading.Event()
        self._lost: str | None = None
        with _guard(path):
            holder = read_holder(path)
            if holder is not None and is_held(holder):
                raise OutputBusyError(_busy(path, holder))
            self._write()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises JobError when the lock was lost, so that nothing more is written."""
        if not self._lost:
            self._look()
        if self._lost:
            raise JobError(self._lost)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with _guard(self._path):
            if self._is_ours():
                self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            try:
                with _guard(self._path):
                    self._look()
                    if self._lost:
                        return
                    self._write()
            except OSError:
                continue  # a full disk: the next beat tries again, and a run on this machine is known by its process

    def _look(self) -> None:
        if not self._path.parent.exists():
            self._lost = f"{self._path}: the output was removed while the run was writing it"
        elif not self._is_ours():
            self._lost = f"{self._path}: another run took over this output"

    def _write(self) -> None:
        write_json(self._path, {**self._record, "heartbeat": time.time()})

    def _is_ours(self) -> bool:
        return bool((read_holder(self._path) or {}).get("token") == self._record["token"])


def read_holder(path: Path) -> dict[str, Any] | None:
    """The record in a lock file; None when there is none, or one that no run can have written."""
    try:
        record = read_json(path)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def is_held(record: dict[str, Any]) -> bool:
    """Whether the run that wrote this record may still be running."""
    age = time.time() - float(record.get("heartbeat", 0))
    return is_alive(record, age, PATIENCE_SECONDS)


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    handle = os.open(path.with_suffix(".guard"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _busy(path: Path, record: dict[str, Any]) -> str:
    place = path.parent.parent
    return f"{place}: another run holds this output (host {record.get('host')}, process {record.get('pid')})"
