"""The requests of one window, kept as compact arrays, handed out in the order of their plan.

Knows requests and how they become numbers and back; when a window is full is decided elsewhere.
"""

import json
from array import array
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.engine.request import Request, RowError, Sampling
from batchgen.engine.tail import longest_first

from .rows import RowTag
from .runs import Part, Parts, Runs, RunSizes
from .token_rows import ROW, TOKEN_BYTES, TokenRows, naming_space

_BUT_SEED = attrgetter(*(field.name for field in fields(Sampling) if field.name != "seed"))


class WindowWriter:
    """Takes requests one by one. What `sizes` says is held in memory; more goes to disk, sorted in the pool."""

    def __init__(self, directory: Path, name: str, pool: Executor, sizes: RunSizes = RunSizes()) -> None:  # noqa: B008 frozen
        self._runs = Runs(directory, name, pool, sizes)
        self._sizes = sizes
        self._directory = directory
        self._errors_path = directory / f"{name}.errors"
        self._errors_file = self._errors_path.open("wb", buffering=1 << 16)
        self._interned: dict[Any, tuple[int, Sampling]] = {}
        self._begin_chunk()
        self.num_rows = 0
        self.num_tokens = 0
        self.asks: Counter[Sampling] = Counter()

    def _begin_chunk(self) -> None:
        self._tokens = array("I")
        self._keys, self._seeds = array("q"), array("q")
        self._lengths, self._samplings = array("i"), array("i")

    @property
    def chunk_is_full(self) -> bool:
        """What is in memory goes to disk with the next request."""
        return len(self._tokens) >= self._sizes.tokens or len(self._keys) >= self._sizes.rows

    @property
    def num_bytes(self) -> int:
        """Bytes on disk if what is in memory were there too."""
        return self._runs.num_bytes + TOKEN_BYTES * len(self._tokens) + ROW.itemsize * len(self._keys)

    def add(self, request: Request) -> None:
        """Stores a request; one that was born failed is stored with its error. Raises StoreError for a full disk."""
        self.num_rows += 1
        if request.error is not None:
            record = json.dumps({"key": request.key, **asdict(request.error)}).encode() + b"\n"
            with naming_space(self._directory, len(record)):
                self._errors_file.write(record)
            return
        if self.chunk_is_full:
            self._runs.add(self._chunk())
            self._begin_chunk()
        self._tokens.extend(request.prompt)
        self._keys.append(request.key)
        self._lengths.append(len(request.prompt))
        self._seeds.append(request.sampling.seed)
        number, sampling = self._intern(request.sampling)
        self._samplings.append(number)
        self.asks[sampling] += 1
        self.num_tokens += len(request.prompt)

    def finish(self) -> "Window":
        """Plans what was stored."""
        with naming_space(self._directory, 0):
            self._errors_file.close()
        samplings = [sampling for _, sampling in self._interned.values()]
        parts = self._runs.parts(self._chunk())
        return Window(self.num_rows, self.num_tokens, self._errors_path, samplings, self._runs, parts, self.asks)

    def _chunk(self) -> TokenRows:
        rows = np.empty(len(self._keys), ROW)
        rows["key"], rows["seed"] = self._keys, self._seeds
        rows["length"], rows["sampling"] = self._lengths, self._samplings
        return TokenRows(np.frombuffer(self._tokens, np.uint32), rows)

    def _intern(self, sampling: Sampling) -> tuple[int, Sampling]:
        """The first sampling that differs by nothing but the seed, which each row may have its own, and its number."""
        return self._interned.setdefault(_BUT_SEED(sampling), (len(self._interned), sampling))


@dataclass(frozen=True)
class Window:
    """Planned requests; they become objects only when they are taken."""

    num_rows: int  # those born failed included
    num_tokens: int
    errors_path: Path
    samplings: list[Sampling]
    runs: Runs
    planned: Parts
    asks: Counter[Sampling]  # what the rows ask for, seeds aside, that are not handed out yet

    def requests(self) -> Generator[Request, None, None]:
        """Those born failed, then the others in planned order. The files are removed behind the last one."""
        try:
            yield from self._failed()
            for part in self.planned:
                yield from self._of_part(part)
        finally:
            self.remove()

    def parts(self) -> Iterator[Part]:
        """The rows in planned order as arrays, instead of `requests`."""
        try:
            yield from self.planned
        finally:
            self.remove()

    def remove(self) -> None:
        """Removes the files."""
        self.runs.remove()
        self.errors_path.unlink(missing_ok=True)

    def _of_part(self, part: Part) -> Iterator[Request]:
        tokens, offsets = part.rows.tokens, part.rows.offsets
        for index in self._order(part):
            key, seed, _, number = part.rows.rows[index].item()
            sampling = self._sampling(number, seed)
            self._handed_out(self.samplings[number])
            yield Request(key, tokens[offsets[index] : offsets[index + 1]].tolist(), sampling, RowTag(key, sampling))

    def _handed_out(self, ask: Sampling) -> None:
        self.asks[ask] -= 1
        if not self.asks[ask]:
            del self.asks[ask]

    def _order(self, part: Part) -> list[int]:
        """As planned; longer answers first in a branch, where they differ and all rows are in one part."""
        order: list[int] = part.plan.order.tolist()
        lengths = [self.samplings[number].max_tokens for number in part.rows.rows["sampling"][part.plan.order].tolist()]
        if len(order) < sum(self.asks.values()) or len(set(lengths)) < 2:
            return order
        return [order[place] for place in longest_first(part.plan.common.tolist(), lengths)]

    def _sampling(self, number: int, seed: int) -> Sampling:
        sampling = self.samplings[number]
        return sampling if sampling.seed == seed else replace(sampling, seed=seed)

    def _failed(self) -> Iterator[Request]:
        neutral = Sampling()
        with self.errors_path.open("rb") as file:
            for line in file:
                record = json.loads(line)
                key = record.pop("key")
                yield Request(key, (), neutral, RowTag(key, neutral), RowError(**record))
