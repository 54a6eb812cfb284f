"""The way of a row: source, prompt, window, engine, result columns.

Knows the order of the steps and their threads; each step is a module of its own, and files of the output are not known.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from batchgen.engine.request import Completion, Request

from .background import Ahead, close
from .prompt import PromptError, Renderer
from .result import ResultEncoder
from .rows import RowTag, Skipped, Source
from .windows import WindowBudget, plan_windows

_COMPLETIONS_AHEAD = 4096
_BATCH_ROWS = 256
_BATCH_SECONDS = 0.2


class Generator(Protocol):
    """The part of the engine that rows need."""

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]: ...


def answers(
    source: Source,
    renderer: Renderer,
    engine: Generator,
    encoder: ResultEncoder,
    done: Callable[[int], bool] = lambda position: False,
    skip: Callable[[Skipped], None] = lambda skipped: None,
    directory: Path | None = None,
    budget: WindowBudget = WindowBudget(),  # noqa: B008 frozen
) -> Iterator[pa.RecordBatch]:
    """Batches of `encoder.schema` in the order in which rows finish, each row that is not `done` exactly once.

    Rows left out by policy go to `skip`, in the consumer's thread, before the batches that follow them end.
    Reading, rendering and planning run in one thread, the engine in another, encoding in the consumer's. `directory`
    holds the token store. Raises what any of them raises, and PromptError when the input lacks a column that is used.
    """
    require_columns(renderer, source.schema)
    skipped: deque[Skipped] = deque()
    stop = threading.Event()
    requests = _render(source, renderer, done, skipped)
    windows = plan_windows(requests, directory, budget, stop)
    with Ahead(_generate(engine, windows), _COMPLETIONS_AHEAD, stop) as completions:
        try:
            for batch in completions.batches(_BATCH_ROWS, _BATCH_SECONDS):
                _drain(skipped, skip)
                yield encoder.encode(batch)
        finally:
            stop.set()
    _drain(skipped, skip)


def require_columns(renderer: Renderer, schema: pa.Schema) -> None:
    """Raises PromptError naming a column that prompts or per-row values need and the input lacks."""
    missing = sorted(renderer.columns - set(schema.names))
    if missing:
        raise PromptError(f"prompt: the input has no column {missing[0]!r}, only {', '.join(schema.names)}")


def _render(
    source: Source, renderer: Renderer, done: Callable[[int], bool], skipped: deque[Skipped]
) -> Iterator[Request]:
    for batch in source.batches(columns=sorted(renderer.columns)):
        for outcome in renderer.render(batch, done):
            if isinstance(outcome, Skipped):
                skipped.append(outcome)
            else:
                yield outcome


def _generate(engine: Generator, windows: Iterator[Iterator[Request]]) -> Iterator[Completion]:
    """Completions of all windows as one stream, so that the engine does not drain between them."""
    waiting: dict[int, RowTag] = {}
    completions = engine.run(_watch(chain.from_iterable(windows), waiting))
    try:
        for completion in completions:
            tag = waiting.pop(completion.key, None)
            if tag is None or tag is not completion.tag:
                raise RuntimeError(f"the engine answered row {completion.key}, which is not waiting for an answer")
            yield completion
    finally:
        close(completions)
        close(windows)
    if waiting:
        raise RuntimeError(f"the engine gave no answer for {len(waiting)} rows, among them row {min(waiting)}")


def _watch(requests: Iterable[Request], waiting: dict[int, RowTag]) -> Iterator[Request]:
    for request in requests:
        waiting[request.key] = request.tag
        yield request


def _drain(skipped: deque[Skipped], skip: Callable[[Skipped], None]) -> None:
    while skipped:
        skip(skipped.popleft())
