"""An engine made of engines: the workers of a cluster behind the interface of one.

Knows workers by a small protocol; how they are started and reached is a matter of the cluster, see ray_cluster.py.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from batchgen.engine.config import EngineSettings
from batchgen.engine.request import Completion, Request
from batchgen.engine.statistics import Statistics

from ..errors import JobError
from .pieces import Pieces

_LOSSES_PER_WORKER = 2  # workers that may die in the place of one before the run is given up
_COMPLETIONS_AHEAD = 4096
_PAUSE_SECONDS = 0.05
_LOADING_SECONDS = 1.0
_GAUGES = ("running", "kv_blocks_used", "kv_blocks_peak", "kv_blocks_total")


class WorkerLostError(Exception):
    """The process of a worker, or its machine, is gone."""


@dataclass(frozen=True)
class Facts:
    """What a worker says of its engine once it is loaded."""

    resolved: Mapping[str, Any]
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Progress:
    """What a worker has done since it was last asked. `waiting`: rows that its engine has not taken yet."""

    completions: Sequence[Completion]
    waiting: int
    statistics: Statistics


class Worker(Protocol):
    """An engine somewhere else. Every call raises WorkerLostError when it is gone."""

    def facts(self, seconds: float) -> Facts | None:
        """Waits so long for the model to be loaded; None while it is not. It is lost when loading fails."""
        ...

    def begin(self) -> None:
        """A run starts; what is left of an earlier one is dropped."""
        ...

    def advance(self, requests: Sequence[Request], low: int, last: bool) -> Progress:
        """Gives the worker more rows and takes what it has finished; returns within about a second.

        It returns at once when no more than `low` rows wait. `last`: there is no more for now. Raises what the engine
        raised.
        """
        ...

    def interrupt(self) -> None: ...


@dataclass
class _Desk:
    """One worker's place in a run: what it has been given and not yet answered."""

    number: int
    worker: Worker
    loaded: bool = True
    open: dict[int, Request] = field(default_factory=dict)
    given: int = 0  # rows of the last piece
    waiting: int = 0
    statistics: Statistics = field(default_factory=Statistics)
    earlier: Statistics = field(default_factory=Statistics)  # of workers that sat here before


class ClusterEngine:
    """Runs requests on all workers at once. `hire(number)` starts a worker, and another in its place if it dies."""

    def __init__(self, tokenizer: Any, hire: Callable[[int], Worker], num_workers: int) -> None:
        """Starts the workers and waits until each has loaded its model. Raises JobError."""
        self.tokenizer = tokenizer
        self.statistics = Statistics()
        self._hire = hire
        self._workers = [hire(number) for number in range(num_workers)]
        facts = [_wait_for(worker) for worker in self._workers]
        self.bounds = facts[0]
        self.resolved = {**facts[0].resolved, "workers": num_workers}
        self._interrupted = threading.Event()
        self._losses = 0
        self._losses_lock = threading.Lock()

    def interrupt(self) -> None:
        """Ends the run after the present step of each worker."""
        self._interrupted.set()
        for worker in self._workers:
            worker.interrupt()

    def adopt(self, settings: EngineSettings) -> None:
        """Nothing: workers keep the limits that they were started with, those of a job's first step; see `resolved`."""

    def prepare(self, num_tokens: float) -> None:
        """Nothing: how much of the job a worker will hold is not known."""

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions in the order in which they come in. Raises what a worker's engine raises."""
        self._interrupted.clear()
        self.statistics = Statistics()
        outcomes: queue.Queue[Completion | Exception | None] = queue.Queue(_COMPLETIONS_AHEAD)
        alone = threading.Event()  # nobody reads the outcomes any more

        def put(outcome: Completion | Exception | None) -> None:
            while not alone.is_set():
                try:
                    return outcomes.put(outcome, timeout=0.2)
                except queue.Full:
                    continue
            return None

        pieces = Pieces(_alive(requests, put), len(self._workers))
        desks = [_Desk(number, worker) for number, worker in enumerate(self._workers)]
        threads = [
            threading.Thread(target=self._serve, args=(desk, desks, pieces, put), name=f"worker-{desk.number}")
            for desk in desks
        ]
        for thread in threads:
            thread.start()
        try:
            yield from self._outcomes(outcomes, len(threads))
        finally:
            alone.set()
            self.interrupt()
            for thread in threads:
                thread.join()

    @staticmethod
    def _outcomes(outcomes: "queue.Queue[Completion | Exception | None]", num_workers: int) -> Iterator[Completion]:
        """Until every worker has said that it is done."""
        while num_workers:
            outcome = outcomes.get()
            if outcome is None:
                num_workers -= 1
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                yield outcome

    def _serve(
        self,
        desk: _Desk,
        desks: list[_Desk],
        pieces: Pieces,
        put: Callable[[Completion | Exception | None], None],
    ) -> None:
        """The thread of one worker."""
        try:
            desk.worker.begin()
            while not self._interrupted.is_set() and self._step(desk, desks, pieces, put):
                pass
            put(None)
        except Exception as error:
            put(error)

    def _step(
        self,
        desk: _Desk,
        desks: list[_Desk],
        pieces: Pieces,
        put: Callable[[Completion | Exception | None], None],
    ) -> bool:
        """One exchange with the worker; False when neither it nor anybody else has work that may come to it."""
        if not desk.loaded and not self._welcome(desk, pieces):
            return _is_needed(desk, desks, pieces)
        hungry = desk.waiting <= desk.given // 2
        piece = pieces.take(desk.number) if hungry else None
        requests = list(piece.requests) if piece is not None else []
        last = hungry and piece is None
        if not requests and not desk.open:
            if not any(other.open for other in desks):
                return False
            time.sleep(_PAUSE_SECONDS)  # a worker with open rows may die, and they would come here
            return True
        if requests:
            desk.given = len(requests)
            desk.open.update((request.key, request) for request in requests)
        try:
            progress = desk.worker.advance([_bare(request) for request in requests], desk.given // 2, last)
        except WorkerLostError as error:
            self._replace(desk, pieces, error)
            return True
        desk.waiting, desk.statistics = progress.waiting, progress.statistics
        self._sum(desks)
        for completion in progress.completions:
            put(replace(completion, tag=desk.open.pop(completion.key).tag))
        return True

    def _replace(self, desk: _Desk, pieces: Pieces, error: WorkerLostError) -> None:
        """Hands out the rows of a dead worker again, and puts another in its place. Raises JobError."""
        with self._losses_lock:
            self._losses += 1
            if self._losses > _LOSSES_PER_WORKER * len(self._workers):
                raise JobError(f"workers died {self._losses} times, the last with: {error}") from error
        pieces.give_back(list(desk.open.values()))
        desk.open.clear()
        desk.given = desk.waiting = 0
        desk.earlier = total([desk.earlier, past(desk.statistics)])
        desk.statistics = Statistics()
        desk.worker = self._workers[desk.number] = self._hire(desk.number)
        desk.loaded = False

    def _welcome(self, desk: _Desk, pieces: Pieces) -> bool:
        """Whether the worker in a dead one's place can begin. It may die, too, and may never get a machine."""
        try:
            desk.loaded = desk.worker.facts(_LOADING_SECONDS) is not None
            if desk.loaded:
                desk.worker.begin()
        except WorkerLostError as error:
            self._replace(desk, pieces, error)
        return desk.loaded

    def _sum(self, desks: list[_Desk]) -> None:
        summed = total([part for desk in desks for part in (desk.earlier, desk.statistics)])
        for item in fields(Statistics):
            setattr(self.statistics, item.name, getattr(summed, item.name))


def _wait_for(worker: Worker) -> Facts:
    """What a worker says once it is loaded. Raises JobError when it cannot be."""
    try:
        while (facts := worker.facts(_LOADING_SECONDS)) is None:
            pass
    except WorkerLostError as error:
        raise JobError(str(error)) from error
    return facts


def _is_needed(desk: _Desk, desks: list[_Desk], pieces: Pieces) -> bool:
    """Whether there are rows that only the worker to come may be there to do."""
    if any(other.open for other in desks):
        return True
    piece = pieces.take(desk.number)
    if piece is not None:
        pieces.give_back(piece.requests)
    return piece is not None


def _bare(request: Request) -> Request:
    """The request as it travels: without its tag, the prompt in the smallest form."""
    prompt: Any = np.asarray(request.prompt, np.int32)
    return replace(request, prompt=prompt, tag=None)


def _alive(requests: Iterable[Request], put: Callable[[Completion], None]) -> Iterator[Request]:
    """Rows to compute; those that failed before they came here are passed through."""
    for request in requests:
        if request.error is None:
            yield request
        else:
            put(Completion(request.key, (), error=request.error, tag=request.tag))


def past(statistics: Statistics) -> Statistics:
    """What is left of a run that is over: its counters, not the gauges of its last step."""
    return replace(statistics, **dict.fromkeys(_GAUGES, 0))


def total(parts: Iterable[Statistics]) -> Statistics:
    """The sums of all counters."""
    parts = list(parts)
    return Statistics(**{item.name: sum(getattr(part, item.name) for part in parts) for item in fields(Statistics)})
