"""Asks a run to end early: by SIGINT, SIGTERM or a deadline, each with its exit code.

Knows only the wish and its reason. A signal is noted and nothing else; the run asks at the places where it can end.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType

EXIT_CODES = {"deadline": 4, "interrupted": 130, "terminated": 143}
_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Stopped(BaseException):
    """Raised by `Stop.check` when the run is to end early."""


class Stop:
    """The wish to end, and why. Signals count inside `listening` only; a second one ends the process at once."""

    def __init__(self, deadline: datetime | None = None) -> None:
        self.reason: str | None = None
        self._deadline = deadline

    @property
    def exit_code(self) -> int:
        return 0 if self.reason is None else EXIT_CODES[self.reason]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes over the signals for the block, in the main thread of a process; others hear of the deadline only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def is_due(self) -> bool:
        """Whether the run is to end."""
        if self.reason is None and self._deadline is not None and datetime.now() >= self._deadline:
            self.reason = "deadline"
        return self.reason is not None

    def check(self) -> None:
        """Raises Stopped when the run is to end."""
        if self.is_due():
            raise Stopped

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.reason in _SIGNALS.values():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(signal.Signals(number))
        else:
            self.reason = _SIGNALS[signal.Signals(number)]
