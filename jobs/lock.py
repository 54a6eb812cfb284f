"""One live run per output: a record of owner and heartbeat, taken over when the owner is dead.

On this machine, looking and taking happen under a file lock that the kernel drops when its holder dies. In a store, who
takes over creates the record with the next number, which the store grants to one only. Two takers cannot both win.
"""

import fcntl
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from batchgen.pipeline.place import AnyPath, RemotePath

from .errors import JobError, OutputBusyError
from .files import read_json, write_json
from .owner import describe, is_alive

HEARTBEAT_SECONDS = 5.0
PATIENCE_SECONDS = 60.0  # how old the heartbeat of a run on another machine may be


_NUMBERED = re.compile(r"lock-(\d{6,})\.json")


class Claim(Protocol):
    """The record of a lock as one kind of place keeps it; `token` tells whose it is."""

    @property
    def path(self) -> AnyPath: ...

    def take(self, record: dict[str, Any]) -> None:
        """Raises OutputBusyError when another live run holds it."""
        ...

    def beat(self, record: dict[str, Any]) -> bool:
        """Writes the record again; False when it is another's by now, or gone."""
        ...

    def is_ours(self, token: str) -> bool: ...

    def drop(self, token: str) -> None:
        """Removes the record, if it is still ours."""
        ...


class Lock:
    """Holds an output until `release`; raises OutputBusyError when another live run holds it."""

    def __init__(self, path: AnyPath) -> None:
        self._claim: Claim = StoreClaim(path) if isinstance(path, RemotePath) else FileClaim(path)
        self._owner = {**describe(), "token": uuid.uuid4().hex}
        self._released = threading.Event()
        self._lost: str | None = None
        self._claim.take(self._record())
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
        self._claim.drop(self._owner["token"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            try:
                if not self._claim.beat(self._record()):
                    self._look()
                    return
            except OSError:
                continue  # a full disk: the next beat tries again, and a run on this machine is known by its process

    def _look(self) -> None:
        path = self._claim.path
        if self._claim.is_ours(self._owner["token"]):
            return
        if path.parent.exists():
            self._lost = f"{path}: another run took over this output"
        else:
            self._lost = f"{path}: the output was removed while the run was writing it"

    def _record(self) -> dict[str, Any]:
        return {**self._owner, "heartbeat": time.time()}


class FileClaim:
    """One file of this machine, looked at and written under a file lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def take(self, record: dict[str, Any]) -> None:
        with _guard(self.path):
            _require_free(self.path, _read_record(self.path))
            write_json(self.path, record)

    def beat(self, record: dict[str, Any]) -> bool:
        if not self.path.parent.exists():
            return False
        with _guard(self.path):
            if not self.is_ours(record["token"]):
                return False
            write_json(self.path, record)
        return True

    def is_ours(self, token: str) -> bool:
        return bool((_read_record(self.path) or {}).get("token") == token)

    def drop(self, token: str) -> None:
        if self.path.parent.exists():
            with _guard(self.path):
                if self.is_ours(token):
                    self.path.unlink()


class StoreClaim:
    """Numbered objects beside `path`: the one with the highest number counts, and each is created by one run only."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path

    def take(self, record: dict[str, Any]) -> None:
        number, holder = _newest(self.path)
        _require_free(self.path, holder)
        mine = self.path.with_name(f"lock-{number + 1:06d}.json")
        try:
            mine.create(json.dumps(record).encode())
        except FileExistsError as error:
            raise OutputBusyError(_busy(self.path, _newest(self.path)[1] or {})) from error
        _require_exclusive(mine)
        for other in _numbered(self.path, below=number + 1):
            other.unlink(missing_ok=True)
        self.path = mine

    def beat(self, record: dict[str, Any]) -> bool:
        if not self.is_ours(record["token"]):
            return False
        self.path.write_bytes(json.dumps(record).encode())
        return True

    def is_ours(self, token: str) -> bool:
        return bool((_newest(self.path)[1] or {}).get("token") == token)

    def drop(self, token: str) -> None:
        if self.is_ours(token):
            self.path.unlink(missing_ok=True)


def read_holder(path: AnyPath) -> dict[str, Any] | None:
    """The record of whoever holds an output; None when there is none, or one that no run can have written."""
    return _newest(path)[1] if isinstance(path, RemotePath) else _read_record(path)


def _read_record(path: AnyPath) -> dict[str, Any] | None:
    try:
        record = read_json(path)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _newest(path: RemotePath) -> tuple[int, dict[str, Any] | None]:
    """The highest number of a record beside `path`, and that record; 0 and None when there is none."""
    paths = _numbered(path)
    if not paths:
        return 0, None
    number = _number(paths[-1])
    return number, _read_record(paths[-1])


def _numbered(path: RemotePath, below: int | None = None) -> list[RemotePath]:
    """Records beside `path`, the newest last."""
    try:
        found = [other for other in path.parent.iterdir() if _NUMBERED.fullmatch(other.name)]
    except FileNotFoundError:
        return []
    return sorted((other for other in found if below is None or _number(other) < below), key=_number)


def _number(path: RemotePath) -> int:
    match = _NUMBERED.fullmatch(path.name)
    return int(match[1]) if match else 0


def _require_exclusive(path: RemotePath) -> None:
    """Raises JobError when the store makes a file that is there already: it could not keep two runs apart."""
    try:
        path.create(path.read_bytes())
    except FileExistsError:
        return
    cure = "so two runs could not be kept apart; choose another output.path"
    raise JobError(f"{path.parent.parent}: the store makes a file anew that is there already, {cure}")


def _require_free(path: AnyPath, holder: dict[str, Any] | None) -> None:
    if holder is not None and is_held(holder):
        raise OutputBusyError(_busy(path, holder))


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


def _busy(path: AnyPath, record: dict[str, Any]) -> str:
    place = path.parent.parent
    return f"{place}: another run holds this output (host {record.get('host')}, process {record.get('pid')})"
