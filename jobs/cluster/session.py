"""A worker's own side: an engine in a thread that takes rows as they are given and keeps what it has finished.

Knows the engine's `run`; the cluster calls its methods from another process.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from batchgen.engine.request import Completion, Request
from batchgen.engine.statistics import Statistics

from .engine import Facts, Progress, past, total

_LINGER_SECONDS = 0.5  # how long an exchange waits for something to tell


class WorkerSession:
    """Runs one engine for a driver. `engine` is what `Engine.load` returns.

    The engine's run goes on over many exchanges, so that nothing drains between pieces; it ends when the driver says
    that there is no more for now, and the next rows begin another.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._waiting: deque[Request] = deque()
        self._completions: list[Completion] = []
        self._low = 0  # rows waiting at which the driver wants to know
        self._last = False
        self._dropping = False
        self._busy = False
        self._error: Exception | None = None
        self._earlier = Statistics()
        self._thread.start()

    def facts(self) -> Facts:
        """What is known of the engine."""
        return Facts(dict(self._engine.resolved), self._engine.bounds.eos_ids)

    def begin(self) -> None:
        """A run starts: drops what is left of an earlier one."""
        self.interrupt()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            self._completions, self._error, self._earlier = [], None, Statistics()
            self._dropping = False

    def advance(self, requests: Sequence[Request], low: int, last: bool) -> Progress:
        """Takes rows and gives back what has finished: once there is something, or no more than `low` rows wait.

        `last`: there is no more for now. Raises what the engine raised.
        """
        with self._changed:
            self._waiting.extend(replace(one, prompt=one.prompt.tolist()) for one in requests)  # type: ignore[attr-defined]
            self._low, self._last = low, last
            self._changed.notify_all()
            self._changed.wait_for(self._has_news, _LINGER_SECONDS)
            if self._error is not None:
                raise self._error
            completions, self._completions = self._completions, []
            return Progress(completions, len(self._waiting), total([self._earlier, self._engine.statistics]))

    def interrupt(self) -> None:
        """Ends the run after its present step."""
        with self._changed:
            self._dropping = True
            self._waiting.clear()
            self._changed.notify_all()
            self._engine.interrupt()

    def _has_news(self) -> bool:
        hungry = not self._last and len(self._waiting) <= self._low
        return bool(self._completions) or hungry or self._error is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                self._busy = True
            try:
                for completion in self._engine.run(self._incoming()):
                    with self._changed:
                        self._completions.append(completion)
                        self._changed.notify_all()
            except Exception as error:
                self._error = error
            with self._changed:
                self._earlier = total([self._earlier, past(self._engine.statistics)])
                self._engine.statistics = Statistics()
                self._busy = False
                self._changed.notify_all()

    def _incoming(self) -> Iterator[Request]:
        """The rows of one run of the engine."""
        while True:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._last or self._dropping)
                if self._dropping or not self._waiting:
                    return
                request = self._waiting.popleft()
            yield request
