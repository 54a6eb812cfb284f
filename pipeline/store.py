"""The requests of one window, kept as compact arrays and as tokens on disk, handed out in the order of their plan.

Knows requests and files of one directory; when a window is full is decided elsewhere.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.plan import Plan, plan_tokens
from batchgen.engine.request import Request, RowError, Sampling

from .rows import RowTag


class WindowWriter:
    """Takes requests one by one; memory per request is some 30 bytes, whatever its prompt."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.tokens"
        self._errors_path = directory / f"{name}.errors"
        self._file = self._path.open("wb", buffering=1 << 20)
        self._errors_file = self._errors_path.open("wb", buffering=1 << 16)
        self._keys = array("q")
        self._lengths = array("q")
        self._samplings = array("l")
        self._interned: dict[Sampling, int] = {}
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
        self._samplings.append(self._interned.setdefault(request.sampling, len(self._interned)))
        self.num_tokens += len(request.prompt)

    def finish(self) -> "Window":
        """Plans what was stored."""
        self._file.close()
        self._errors_file.close()
        offsets = np.concatenate([[0], np.cumsum(np.frombuffer(self._lengths, np.int64))]).astype(np.int64)
        tokens = _map(self._path, self.num_tokens)
        return Window(
            path=self._path,
            errors_path=self._errors_path,
            keys=np.frombuffer(self._keys, np.int64),
            offsets=offsets,
            sampling_ids=np.frombuffer(self._samplings, np.dtype("l")),
            samplings=list(self._interned),
            plan=plan_tokens(tokens, offsets),
        )


@dataclass(frozen=True)
class Window:
    """Planned requests; they become objects only when they are taken."""

    path: Path
    errors_path: Path
    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sampling_ids: NDArray[np.int_]
    samplings: list[Sampling]
    plan: Plan

    def requests(self) -> Iterator[Request]:
        """Those born failed, then the others in planned order. The files are removed behind the last one."""
        try:
            yield from self._failed()
            tokens = _map(self.path, int(self.offsets[-1]))
            for index in self.plan.order:
                key, sampling = int(self.keys[index]), self.samplings[self.sampling_ids[index]]
                prompt = tokens[self.offsets[index] : self.offsets[index + 1]].tolist()
                yield Request(key, prompt, sampling, RowTag(key, sampling))
        finally:
            self.path.unlink(missing_ok=True)
            self.errors_path.unlink(missing_ok=True)

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
