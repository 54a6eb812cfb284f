"""Forward passes replayed from recordings, for the sizes of step that recur: the host then launches one thing, not all.

Knows which steps are recorded and how they are padded; what a recording is on a device is a recorder's business.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.native.library import available, open_library
from ..kernels.native.tape import NotRecordableError
from .batch import Batch
from .kv import KVPages
from .recorders import CudaRecorder, NativeRecorder, Recorder, Replay, Size

log = logging.getLogger(__name__)

RECURS = 3  # steps of a size after which it is recorded
MOST = 40  # recordings kept, the latest used ones


class Model(Protocol):
    """What is recorded."""

    def forward(self, batch: Batch, pages: KVPages) -> Tensor: ...


class Executor(Protocol):
    """Runs a model over a batch: [R, H], the states that are sampled from, good until the next call."""

    @property
    def scrap_blocks(self) -> int:
        """Blocks at the end of the pages that must be nobody's."""
        ...

    def forward(self, model: Model, batch: Batch, pages: KVPages) -> Tensor: ...


class Eager:
    """Launches every kernel of every step."""

    scrap_blocks = 0

    def forward(self, model: Model, batch: Batch, pages: KVPages) -> Tensor:
        return model.forward(batch, pages)


EAGER = Eager()


@dataclass(slots=True)
class Recurrence:
    """Says which keys have come often enough to be worth a recording, and which recordings to give up."""

    after: int = RECURS
    most: int = MOST
    _seen: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)

    def recurs(self, key: Hashable) -> bool:
        """Takes note of one more step of this kind."""
        self._seen[key] = self._seen.get(key, 0) + 1
        self._seen.move_to_end(key)
        return self._seen[key] >= self.after

    def surplus(self, kept: Mapping[Hashable, object]) -> list[Hashable]:
        """Those of the recordings kept, the longest unused first, that are beyond `most`."""
        by_use = [key for key in self._seen if key in kept]
        return by_use[: max(0, len(by_use) - self.most)]


@dataclass(slots=True)
class Recording:
    """A forward pass of some rows over buffers of its own. `scrap`: the slot that rows of padding write to."""

    batch: Batch
    scrap: int
    replay: Replay

    def fits(self, batch: Batch) -> bool:
        """The attention of this step can be laid out where the recorded one was."""
        return all(layout.holds(fresh) for layout, fresh in _layouts(self.batch, batch))

    def run(self, batch: Batch) -> Tensor:
        """The states of the batch's sampled rows."""
        for layout, fresh in _layouts(self.batch, batch):
            layout.refill(fresh)
        fill(self.batch, batch, self.scrap)
        step = size_of(batch)
        return self.replay(step)[: step.sampled]


def _layouts(recorded: Batch, batch: Batch) -> Iterator[tuple[Any, Any]]:
    """What the attention kernels have laid out for each geometry of heads, then and now."""
    for geometry, layout in recorded.attention.layouts.items():
        yield layout, batch.attention.laid_out(geometry)


def size_of(batch: Batch) -> Size:
    return Size(len(batch.tokens), len(batch.sampled))


def static_batch(batch: Batch, size: Size, scrap: int) -> Batch:
    """Buffers of such a size that hold the batch, and its attention plan."""
    like = batch.tokens
    tokens, positions, slots, choice = (like.new_zeros(size.tokens) for _ in range(4))
    static = Batch(tokens, positions, slots, choice, batch.attention, like.new_zeros(size.sampled))
    fill(static, batch, scrap)
    return static


def fill(static: Batch, batch: Batch, scrap: int) -> None:
    """Puts a batch into the buffers; the rows behind it write where nobody reads."""
    count = len(batch.tokens)
    static.tokens[:count].copy_(batch.tokens)
    static.positions[:count].copy_(batch.positions)
    static.rope_choice[:count].copy_(batch.rope_choice)
    static.slots[:count].copy_(batch.slots)
    static.slots[count:].fill_(scrap)
    static.sampled[: len(batch.sampled)].copy_(batch.sampled)


class Recorded:
    """Records the steps that its recorder takes; any other is launched kernel by kernel.

    Rows of padding write to the last block of the pages. What cannot be recorded, or has no memory to be, is not tried
    again.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.scrap_blocks = recorder.scrap_blocks
        self._recurrence = Recurrence()
        self._recordings: dict[Hashable, Recording] = {}
        self._refused: set[Hashable] = set()

    def forward(self, model: Model, batch: Batch, pages: KVPages) -> Tensor:
        count, size = len(batch.tokens), self._recorder.size(size_of(batch))
        if size is None:
            return model.forward(batch, pages)
        key = id(model), size
        recurs, known = self._recurrence.recurs(key), self._recordings.get(key)
        if known is not None and known.fits(batch):
            return known.run(batch)
        if not recurs or key in self._refused:
            return model.forward(batch, pages)
        try:
            self._recordings[key] = made = self._record(model, batch, pages, size, known)
        except NotRecordableError as error:
            log.debug("steps of %d rows are not recorded: %s", count, error)
            self._refused.add(key)
            return model.forward(batch, pages)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.warning("no memory to record steps of %d rows, which run slower; lower engine.memory", count)
            self._refused.add(key)
            return model.forward(batch, pages)
        for old in self._recurrence.surplus(self._recordings):
            del self._recordings[old]
        return made.run(batch)

    def _record(self, model: Model, batch: Batch, pages: KVPages, size: Size, known: Recording | None) -> Recording:
        """Records the batch; what an earlier recording of its size had room for, this one has too."""
        if known is not None:
            for layout, fresh in _layouts(known.batch, batch):
                fresh.widen(layout)
        scrap = (pages.num_blocks - 1) * pages.block_size
        static = static_batch(batch, size, scrap)
        return Recording(static, scrap, self._recorder.record(lambda: model.forward(static, pages), size))


def out_of_memory(error: BaseException | None) -> bool:
    """It is a lack of memory, or came of one: what ends a capture reports that the capture is void."""
    while error is not None and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        error = error.__context__
    return error is not None


def host_executor() -> Executor:
    """On tapes of the best native library; without one every op is torch's."""
    sets = available()
    return Recorded(NativeRecorder(open_library(sets[0]))) if sets else EAGER


# By kind of device.
EXECUTORS: dict[str, Callable[[], Executor]] = {"cpu": host_executor, "cuda": lambda: Recorded(CudaRecorder())}
