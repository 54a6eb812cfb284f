"""Kills a run at its n-th change of the file system, inside the test's own process, or sends it a signal there.

From a kill on nothing that the run does reaches the disk any more, as after SIGKILL or a power cut.
"""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync", "link")


class Killed(BaseException):
    """The process is gone."""


class SuddenDeath:
    """Counts changes of the file system; the one with number `at` and all later ones do not happen.

    With `error` set the change fails once with that error number instead, and the process lives on. With `number`
    the process is sent that signal just before the change, which then happens.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, at: int, error: int | None = None, number: signal.Signals | None = None
    ) -> None:
        self.count = 0
        self.struck = False
        self._at = at
        self._error = error
        self._signal = number
        for name in _CHANGES:
            patch.setattr(os, name, self._guard(getattr(os, name)))

    def _guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self._error is not None and self.count == self._at:
                self.struck = True
                raise OSError(self._error, os.strerror(self._error))
            if self._signal is not None:
                if self.count == self._at:
                    self.struck = True
                    os.kill(os.getpid(), self._signal)
            elif self._error is None and self.count >= self._at:
                self.struck = True
                raise Killed
            return function(*arguments, **options)

        return guarded


def bury(output: Path) -> None:
    """Makes the lock look as if its process were gone, which it would be."""
    lock = output / "__batchgen__" / "lock.json"
    if lock.exists():
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "started": -1.0}))


FULL_DISK = errno.ENOSPC
