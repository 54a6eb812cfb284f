"""The requests of one window, kept as compact arrays and as tokens on disk, handed out in the order of their plan.

Knows requests and files of one directory; when a window is full is decided elsewhere.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.plan import Plan, plan_tokens
from batchgen.engine.request import Request, RowError, Sampling

from .rows import RowTag

_BUT_SEED = attrgetter(*(field.name for field in fields(Sampling) if field.name != "seed"))


class WindowWriter:
    """Takes requests one by one; memory per request is 28 bytes, some 60 with its plan, whatever it holds."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.tokens"
        self._errors_path = directory / f"{name}.errors"
        self._file = self._path.open("wb", buffering=1 << 20)
        self._errors_file = self._errors_path.open("wb", buffering=1 << 16)
        self._keys = array("q")
        self._lengths = array("q")
        self._seeds = array("q")
        self._samplings = array("i")
        self._interned: dict[Any, tuple[int, Sampling]] = {}
        self.num_rows = 0
        self.num_tokens = 0

    def add(self, request: Request) -> None:
        """Stores a request; one that was born failed is stored with its error."""
        self.num_rows += 1
        if request.error is not None:
            record = {"key": request.key, **asdict(request.error)}
            self._errors_file.write(json.dumps(record).encode() + b"\n")
            return
        self._file.write(array("I", request.prompt).tobytes())
        self._keys.append(request.key)
        self._lengths.append(len(request.prompt))
        self._seeds.append(request.sampling.seed)
        self._samplings.append(self._intern(request.sampling))
        self.num_tokens += len(request.prompt)

    def finish(self) -> "Window":
        """Plans what was stored."""
        self._file.close()
        self._errors_file.close()
        offsets = np.concatenate([[0], np.cumsum(np.frombuffer(self._lengths, np.int64))]).astype(np.int64)
        tokens = _map(self._path, self.num_tokens)
        return Window(
            num_rows=self.num_rows,
            path=self._path,
            errors_path=self._errors_path,
            keys=np.frombuffer(self._keys, np.int64),
            offsets=offsets,
            seeds=np.frombuffer(self._seeds, np.int64),
            sampling_ids=np.frombuffer(self._samplings, np.int32),
            samplings=[sampling for _, sampling in self._interned.values()],
            plan=plan_tokens(tokens, offsets),
        )

    def _intern(self, sampling: Sampling) -> int:
        """The number of the first sampling that differs by nothing but the seed, which each row may have its own."""
        return self._interned.setdefault(_BUT_SEED(sampling), (len(self._interned), sampling))[0]


@dataclass(frozen=True)
class Window:
    """Planned requests; they become objects only when they are taken."""

    num_rows: int  # those born failed included
    path: Path
    errors_path: Path
    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    seeds: NDArray[np.int64]
    sampling_ids: NDArray[np.int32]
    samplings: list[Sampling]
    plan: Plan

    def requests(self) -> Iterator[Request]:
        """Those born failed, then the others in planned order. The files are removed behind the last one."""
        try:
            yield from self._failed()
            tokens = _map(self.path, int(self.offsets[-1]))
            for index in self.plan.order:
                key, sampling = int(self.keys[index]), self._sampling(index)
                prompt = tokens[self.offsets[index] : self.offsets[index + 1]].tolist()
                yield Request(key, prompt, sampling, RowTag(key, sampling))
        finally:
            self.path.unlink(missing_ok=True)
            self.errors_path.unlink(missing_ok=True)

    def _sampling(self, index: np.int64) -> Sampling:
        sampling: Sampling = self.samplings[int(self.sampling_ids[index])]
        seed = int(self.seeds[index])
        return sampling if sampling.seed == seed else replace(sampling, seed=seed)

    def _failed(self) -> Iterator[Request]:
        neutral = Sampling()
        with self.errors_path.open("rb") as file:
            for line in file:
                record = json.loads(line)
                key = record.pop("key")
                yield Request(key, (), neutral, RowTag(key, neutral), RowError(**record))


def _map(path: Path, num_tokens: int) -> NDArray[np.uint32]:
    if num_tokens == 0:
        return np.zeros(0, np.uint32)
    return np.asarray(np.memmap(path, np.uint32, mode="r", shape=(num_tokens,)))  # plain slices are much faster
