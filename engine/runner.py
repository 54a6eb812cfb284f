"""One step on the device: its tensors, the forward pass, what is drawn from the logits.

Knows how a step is executed, not how it was chosen; a step that raises is split until the fault stands alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import Kernels
from .batch import Batch
from .items import attention_items
from .kv import KVPages
from .request import RowError
from .sampling import Sampler
from .sequence import Drawn, Feed, Point, Step

LOGITS_BYTES = 16 * 2**20  # float32 logits held at once: what stays in the cache from the head to the draw
MAX_FAILURES = 8  # rows that raise one after the other before the run is given up


class Model(Protocol):
    """What the runner needs of a decoder."""

    def rope_choice(self, length: int) -> int: ...
    def forward(self, batch: Batch, pages: KVPages) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Observer(Protocol):
    """Is shown what each step leaves behind."""

    def saw(self, feeds: list[Feed], hidden: Tensor) -> None:
        """`hidden` [R, H]: the final-normed states at the points of the feeds, in their order."""


class NoObserver:
    """Nobody looks."""

    def saw(self, feeds: list[Feed], hidden: Tensor) -> None:
        return None


NO_OBSERVER = NoObserver()


class EngineFaultError(RuntimeError):
    """Row after row raises: the fault is the engine's or the device's, not the rows'."""


@dataclass(slots=True)
class Runner:
    """Executes steps over one set of KV pages."""

    model: Model
    kernels: Kernels
    pages: KVPages
    sampler: Sampler
    device: torch.device
    observer: Observer = NO_OBSERVER
    failures: int = 0  # rows that raised since one last went through

    def execute(self, step: Step) -> list[list[Drawn]]:
        """One list per feed: what each of its points drew."""
        self.pages.copy_blocks(step.copies)
        return self._isolate(step.feeds)

    @torch.inference_mode()
    def _run(self, feeds: list[Feed]) -> list[list[Drawn]]:
        points, batch = [feed.points for feed in feeds], self._batch(feeds)
        self.sampler.prepare([point for some in points for point in some])
        hidden = self.model.forward(batch, self.pages)
        drawn = iter(
            draw_in_parts(self.sampler, self.model.logits, [point for some in points for point in some], hidden)
        )
        self.observer.saw(feeds, hidden)
        return [list(islice(drawn, len(some))) for some in points]

    def _isolate(self, feeds: list[Feed]) -> list[list[Drawn]]:
        """Runs the feeds; when that raises, each half by itself, down to the one row that is at fault.

        Running a feed again writes the same keys to the same slots, so the others lose nothing.
        """
        try:
            drawn = self._run(feeds)
            self.failures = 0
            return drawn
        except (MemoryError, torch.OutOfMemoryError) as error:
            if len(feeds) == 1:
                raise MemoryError(
                    f"out of memory at {feeds[0].count} tokens a step; lower engine.max_batch_tokens"
                ) from error
        except Exception as error:
            if len(feeds) == 1:
                return [[Drawn(error=self._row_fault(error))]]
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
        items = attention_items(feeds, self.pages.block_size)
        counts = [feed.count for feed in feeds]
        tokens = [token for feed in feeds for token in feed.tokens]
        choices = np.repeat([self.model.rope_choice(feed.sequence.longest) for feed in feeds], counts)
        ends = np.cumsum(counts)
        sampled = [range(end - feed.num_points, end) for feed, end in zip(feeds, ends, strict=True)]
        return Batch(
            tokens=self._tensor(np.array(tokens, dtype=np.int64)),
            positions=self._tensor(items.positions),
            slots=self._tensor(self._slots(feeds)),
            rope_choice=self._tensor(choices),
            attention=self.kernels.plan_attention(items, self.pages.block_size),
            sampled=self._tensor(np.fromiter(chain.from_iterable(sampled), np.int64)),
        )

    def _slots(self, feeds: list[Feed]) -> np.ndarray:
        """Block and offset of every fed token, as one number."""
        size = self.pages.block_size
        parts = []
        for feed in feeds:
            first, end = feed.start // size, -(-(feed.start + feed.count) // size)
            blocks = np.array(feed.sequence.blocks[first:end], dtype=np.int64)
            slots = (blocks[:, None] * size + np.arange(size)).ravel()
            skip = feed.start - first * size
            parts.append(slots[skip : skip + feed.count])
        return np.concatenate(parts)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)


def draw_in_parts(
    sampler: Sampler, logits: Callable[[Tensor], Tensor], points: list[Point], hidden: Tensor
) -> list[Drawn]:
    """What the points draw; `logits` reads their states `hidden` [R, H], a bounded number of them at once."""
    drawn: list[Drawn] = []
    for first, end in pairwise(_cuts(len(points), sampler.vocabulary)):
        drawn += sampler.draw(points[first:end], logits(hidden[first:end]))
    return drawn


def _cuts(num_rows: int, vocabulary: int) -> list[int]:
    """Where equal parts of the rows begin, each with logits of about LOGITS_BYTES at most, and the end."""
    most = max(1, LOGITS_BYTES // (4 * vocabulary))
    parts = -(-num_rows // most)
    return [num_rows * part // parts for part in range(parts + 1)] if parts else []
