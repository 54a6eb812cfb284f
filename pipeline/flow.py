"""The way of a row: source, prompt, window, engine, result columns.

Knows the order of the steps and their threads; each step is a module of its own, and files of the output are not known.
"""

import threading
import time
from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from batchgen.engine.request import Completion, Request, Sample, Sampling

from .background import Ahead, close
from .prompt import PromptError, Renderer
from .result import ResultEncoder
from .rows import RowBatch, RowTag, Skipped, Source
from .windows import Pace, WindowBudget, plan_windows

_ROW_WEIGHT = 64  # of an answer beside its tokens; the unit is one token or one of its alternatives
_WEIGHT_AHEAD = 4096 * _ROW_WEIGHT  # tens of megabytes
_BATCH_WEIGHT = 256 * _ROW_WEIGHT
_BATCH_SECONDS = 0.2
_FIRST_ROWS, _MOST_ROWS = 256, 4096  # rendered at once
_SKIPPED_AHEAD = 1 << 15  # rows
_STOP_SECONDS = 10.0


class Generator(Protocol):
    """The part of the engine that rows need."""

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]: ...
    def interrupt(self) -> None:
        """Ends the run after its present step; called from another thread."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A stream of requests that says what its rest asks for, once that is known."""

    requests: Iterator[Request]
    rest: Callable[[], Mapping[Sampling, int] | None]

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class _Flow:
    """What the threads of one run share: whether it is to end, and rows that were skipped and not yet told."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._skipped: deque[list[Skipped]] = deque()
        self._num_put = self._num_told = 0  # each written by one thread only

    def put_skipped(self, rows: list[Skipped]) -> None:
        """Waits while too many are untold."""
        while self._num_put - self._num_told > _SKIPPED_AHEAD and not self.stop.is_set():
            time.sleep(0.01)
        self._num_put += len(rows)
        self._skipped.append(rows)

    def tell_skipped(self, skip: Callable[[list[Skipped]], None]) -> None:
        while self._skipped:
            rows = self._skipped.popleft()
            skip(rows)
            self._num_told += len(rows)


def answers(
    source: Source,
    renderer: Renderer,
    engine: Generator,
    encoder: ResultEncoder,
    done: Callable[[int], bool] = lambda position: False,
    skip: Callable[[list[Skipped]], None] = lambda skipped: None,
    directory: Path | None = None,
    budget: WindowBudget = WindowBudget(),  # noqa: B008 frozen
    stopping: Callable[[], bool] = lambda: False,
) -> abc.Generator[pa.RecordBatch, None, None]:
    """Batches of `encoder.schema` in the order in which rows finish, each row that is not `done` exactly once.

    A batch comes at least every 0.2 s, without rows when none has finished. Before each, `skip` gets the rows that a
    policy left out and `stopping` is asked: once it is true the engine is interrupted, what has finished by then
    still comes, for some seconds at most, and the iterator ends. Both are called in the consumer's thread.
    Reading, rendering and planning run in one thread, the engine in another, encoding in the consumer's. `directory`
    holds the token store. Raises what any of them raises, and PromptError when the input lacks a column that is used.
    Closing the iterator, an error too, interrupts the engine.
    """
    require_columns(renderer, source.schema)
    flow = _Flow()
    pace = Pace()
    windows = plan_windows(_render(source, renderer, done, flow), directory, budget, flow.stop, pace)
    with Ahead(_generate(engine, windows, flow.stop, pace), _WEIGHT_AHEAD, weight=_weight) as completions:
        try:
            for batch in _until_stopped(completions, engine, stopping, flow):
                flow.tell_skipped(skip)
                yield encoder.encode(batch)
        finally:
            _interrupt(completions, engine, flow)
    flow.tell_skipped(skip)


def require_columns(renderer: Renderer, schema: pa.Schema) -> None:
    """Raises PromptError naming a column that prompts or per-row values need and the input lacks."""
    missing = sorted(renderer.columns - set(schema.names))
    if missing:
        raise PromptError(f"prompt: the input has no column {missing[0]!r}, only {', '.join(schema.names)}")


def _until_stopped(
    completions: Ahead[Completion], engine: Generator, stopping: Callable[[], bool], flow: _Flow
) -> Iterator[list[Completion]]:
    """All batches; or, from the moment of `stopping` on, those that come while the engine ends its step."""
    deadline = float("inf")
    for batch in completions.batches(_BATCH_WEIGHT, _BATCH_SECONDS):
        yield batch
        if deadline == float("inf") and stopping():
            _interrupt(completions, engine, flow)
            deadline = time.monotonic() + _STOP_SECONDS
        if time.monotonic() > deadline:
            return


def _interrupt(completions: Ahead[Completion], engine: Generator, flow: _Flow) -> None:
    """Makes every thread of the run end soon. An engine whose run is over is left alone: it may serve another."""
    if not flow.stop.is_set():
        flow.stop.set()
        if completions.running:
            engine.interrupt()


def _weight(completion: Completion) -> int:
    return _ROW_WEIGHT + sum(map(_sample_weight, completion.samples))


def _sample_weight(sample: Sample) -> int:
    return len(sample.tokens) + sum(1 + len(entry.top) for entry in sample.logprobs or ())


def _render(source: Source, renderer: Renderer, done: Callable[[int], bool], flow: _Flow) -> Iterator[Request]:
    for batch in _small_first(source.batches(columns=sorted(renderer.columns))):
        if flow.stop.is_set():
            return
        outcomes = renderer.render(batch, done)
        del batch  # or its row group would be kept while the next one is read
        skipped = [outcome for outcome in outcomes if isinstance(outcome, Skipped)]
        if skipped:
            flow.put_skipped(skipped)
        yield from (outcome for outcome in outcomes if isinstance(outcome, Request))


def _small_first(batches: Iterable[RowBatch]) -> Iterator[RowBatch]:
    """The same rows, the first of them in small batches, so that long prompts do not hold up the first answer."""
    size = _FIRST_ROWS
    for batch in batches:
        offset = 0
        while offset < batch.num_rows:
            yield batch.slice(offset, size)
            offset += size
            size = min(2 * size, _MOST_ROWS)
        del batch


def _generate(
    engine: Generator, windows: Iterator[Iterator[Request]], stop: threading.Event, pace: Pace
) -> Iterator[Completion]:
    """Completions of all windows as one stream, so that the engine does not drain between them."""
    waiting: dict[int, RowTag] = {}
    completions = engine.run(Asked(_watch(chain.from_iterable(windows), waiting, stop), pace.rest))
    try:
        for completion in completions:
            tag = waiting.pop(completion.key, None)
            if tag is None or tag is not completion.tag:
                raise RuntimeError(f"the engine answered row {completion.key}, which is not waiting for an answer")
            yield completion
    finally:
        close(completions)
        close(windows)
    if waiting and not stop.is_set():
        raise RuntimeError(f"the engine gave no answer for {len(waiting)} rows, among them row {min(waiting)}")


def _watch(requests: Iterable[Request], waiting: dict[int, RowTag], stop: threading.Event) -> Iterator[Request]:
    for request in requests:
        if stop.is_set():
            return
        waiting[request.key] = request.tag
        yield request
