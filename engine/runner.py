"""One step on the device: its tensors, the forward pass, what is drawn from the logits.

Knows how a step is launched, not how it was chosen; a step that raises is split until the fault stands alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import Kernels
from .batch import Batch
from .graphs import EAGER, Executor
from .items import attention_items
from .kv import KVPages
from .link import Link
from .request import RowError
from .sampling import Draws, Head, Sampler
from .sequence import Drawn, Feed, Point, Sequence, Step
from .sharing import Sharing

LOGITS_BYTES = {
    "cpu": 16 * 2**20,
    "cuda": 2**29,
}  # float32, held at once: what stays in a CPU's cache; of a GPU's memory
MAX_FAILURES = 8  # rows that raise one after the other before the run is given up


class Model(Head, Protocol):
    """What the runner needs of a decoder."""

    def rope_choice(self, length: int) -> int: ...
    def forward(self, batch: Batch, pages: KVPages) -> Tensor: ...


class Observer(Protocol):
    """Is shown what each step leaves behind."""

    @property
    def sees_all(self) -> bool:
        """It wants the states of all tokens that are fed, not those alone at which something is drawn."""
        ...

    def copied(self, pairs: list[tuple[int, int]]) -> None:
        """Blocks were copied, (source, destination) each."""

    def saw(self, feeds: list[Feed], batch: Batch, hidden: Tensor) -> None:
        """`hidden` [R, H]: the final-normed states of `batch.sampled`, good until the next step."""


class NoObserver:
    """Nobody looks."""

    sees_all = False

    def copied(self, pairs: list[tuple[int, int]]) -> None:
        return None

    def saw(self, feeds: list[Feed], batch: Batch, hidden: Tensor) -> None:
        return None


NO_OBSERVER = NoObserver()


class EngineFaultError(RuntimeError):
    """Row after row raises: the fault is the engine's or the device's, not the rows'."""


@dataclass(frozen=True, slots=True)
class Part:
    """Feeds of one forward pass under way: what they draw, and in which row each sequence's newest token stands."""

    rows: dict[Sequence, int]
    tokens: Tensor  # [R] int64, on the device
    wait: Callable[[], list[list[Drawn]]]


@dataclass(slots=True)
class Runner:
    """Executes steps over one set of KV pages."""

    model: Model
    kernels: Kernels
    pages: KVPages
    sampler: Sampler
    sharing: Sharing
    executor: Executor = EAGER
    observer: Observer = NO_OBSERVER
    failures: int = 0  # rows that raised since one last went through
    latest: list[Part] = field(default_factory=list)  # of the step launched last

    def reset(self) -> None:
        """A run begins, or is over: nothing of another one is kept."""
        self.sampler.link.bind()
        self.failures, self.latest = 0, []

    @property
    def device(self) -> torch.device:
        return self.sampler.link.device

    def execute(self, step: Step) -> list[list[Drawn]]:
        """One list per feed: what each of its points drew."""
        return self.launch(step)()

    def launch(self, step: Step) -> Callable[[], list[list[Drawn]]]:
        """Starts the step; what is returned waits for it, and gives one list per feed."""
        self._link.bind()  # another engine of this thread may have run since
        self.pages.copy_blocks(step.copies, self.kernels, self._link)
        self.observer.copied(step.copies)
        self.latest = parts = self._isolate(step.feeds)
        return lambda: [drawn for part in parts for drawn in part.wait()]

    @torch.inference_mode()
    def start(self, feeds: list[Feed]) -> Part:
        """Starts the feeds as one forward pass; raises whatever stands in the way."""
        points, batch = [feed.points for feed in feeds], self._batch(feeds)
        self.sampler.prepare([point for some in points for point in some])
        hidden = self._states(feeds, batch)
        draws = draw_in_parts(self.sampler, self.model, [point for some in points for point in some], hidden)
        ends = accumulate(len(some) for some in points)
        rows = {feed.sequence: end - 1 for feed, end, some in zip(feeds, ends, points, strict=True) if some}
        return Part(rows, draws.tokens, partial(_grouped, draws.wait, [len(some) for some in points]))

    def _states(self, feeds: list[Feed], batch: Batch) -> Tensor:
        """[R, H] of `batch.sampled`; the observer is shown them, or those of all tokens."""
        count, device = len(batch.tokens), batch.tokens.device
        wider = self.observer.sees_all and len(batch.sampled) < count
        shown = replace(batch, sampled=torch.arange(count, device=device)) if wider else batch
        hidden = self.executor.forward(self.model, shown, self.pages)
        self.observer.saw(feeds, shown, hidden)
        return hidden[batch.sampled] if wider else hidden

    def _isolate(self, feeds: list[Feed]) -> list[Part]:
        """Starts the feeds; when that raises, each half by itself, down to the one row that is at fault.

        Running a feed again writes the same keys to the same slots, so the others lose nothing.
        """
        try:
            part = self.start(feeds)
            self.failures = 0
            return [part]
        except (MemoryError, torch.OutOfMemoryError) as error:
            if len(feeds) == 1:
                raise MemoryError(
                    f"out of memory at {feeds[0].count} tokens a step; lower engine.max_batch_tokens"
                ) from error
        except Exception as error:
            if len(feeds) == 1:
                fault = [[Drawn(error=self._row_fault(error))]]
                return [Part({}, torch.empty(0, dtype=torch.int64, device=self.device), lambda: fault)]
        middle = len(feeds) // 2
        return self._isolate(feeds[:middle]) + self._isolate(feeds[middle:])

    def _row_fault(self, error: Exception) -> RowError:
        self.failures += 1
        message = f"{type(error).__name__}: {error}"
        if self.failures >= MAX_FAILURES:
            raise EngineFaultError(
                f"the engine failed on {self.failures} rows in a row, last with {message}"
            ) from error
        return RowError("engine", "generate", message, retryable=True)

    def _batch(self, feeds: list[Feed]) -> Batch:
        items = attention_items(feeds, self.pages.block_size, self.sharing)
        counts = [feed.count for feed in feeds]
        tokens = [token for feed in feeds for token in feed.tokens]
        choices = np.repeat([self.model.rope_choice(feed.sequence.longest) for feed in feeds], counts)
        ends = np.cumsum(counts)
        sampled = [[end - feed.count + row for row in feed.rows] for feed, end in zip(feeds, ends, strict=True)]
        return Batch(
            tokens=self._with_drawn(feeds, ends, self._tensor(np.array(tokens, dtype=np.int64))),
            positions=self._tensor(items.positions),
            slots=self._tensor(self._slots(feeds)),
            rope_choice=self._tensor(choices),
            attention=self.kernels.plan_attention(items, self.pages.block_size),
            sampled=self._tensor(np.fromiter(chain.from_iterable(sampled), np.int64)),
        )

    def _with_drawn(self, feeds: list[Feed], ends: np.ndarray, tokens: Tensor) -> Tensor:
        """Puts in the tokens that the step before is drawing. One of a row at fault may be missing: so is its use."""
        places, rows, first = [], [], 0
        for part in self.latest:
            found = [
                (end - 1, part.rows[feed.sequence])
                for feed, end in zip(feeds, ends, strict=True)
                if feed.unknown and feed.sequence in part.rows
            ]
            places += [place for place, _ in found]
            rows += [first + row for _, row in found]
            first += len(part.tokens)
        if places:
            drawn = torch.cat([part.tokens for part in self.latest])
            tokens[self._tensor(np.array(places))] = drawn[self._tensor(np.array(rows))]
        return tokens

    def _slots(self, feeds: list[Feed]) -> np.ndarray:
        """Block and offset of every fed token, as one number."""
        return np.array([slot for feed in feeds for slot in _slots_of(feed, self.pages.block_size)], dtype=np.int64)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return self._link.to_device(values.astype(np.int64, copy=False))

    @property
    def _link(self) -> Link:
        return self.sampler.link


def _slots_of(feed: Feed, size: int) -> list[int]:
    """Without arrays for a single token: most feeds are one, and a step has hundreds of them."""
    sequence, end = feed.sequence, feed.start + feed.count
    if feed.count == 1:
        place = sequence.course.extent(end, size) - 1
        return [sequence.blocks[place // size] * size + place % size]
    places = sequence.course.places(feed.start, end, size)
    first, last = places[0] // size, places[-1] // size
    blocks = np.array(sequence.blocks[first : last + 1], dtype=np.int64)
    slots: list[int] = (blocks[places // size - first] * size + places % size).tolist()
    return slots


def _grouped(wait: Callable[[], list[Drawn]], counts: list[int]) -> list[list[Drawn]]:
    drawn = iter(wait())
    return [list(islice(drawn, count)) for count in counts]


def draw_in_parts(sampler: Sampler, head: Head, points: list[Point], hidden: Tensor) -> Draws:
    """What the points draw; the head reads their states `hidden` [R, H], a bounded number of them at once."""
    most = LOGITS_BYTES[hidden.device.type]
    parts = [
        sampler.draw(points[first:end], head, hidden[first:end])
        for first, end in pairwise(_cuts(len(points), max(1, most // (4 * sampler.vocabulary))))
    ]
    tokens = [part.tokens for part in parts]
    return Draws(
        torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64, device=hidden.device),
        lambda: [drawn for part in parts for drawn in part.wait()],
    )


def _cuts(num_rows: int, most: int) -> list[int]:
    """Where equal parts of the rows begin, each of `most` rows at most, and the end."""
    parts = -(-num_rows // most)
    return [num_rows * part // parts for part in range(parts + 1)] if parts else []
