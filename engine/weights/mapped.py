"""A file seen as bytes, paged in on demand and given back after use; its identity without reading it whole."""

import hashlib
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_SAMPLES = 64
_SAMPLE_BYTES = 4096


class MappedFile:
    """A read-only file in memory (private mapping: writing to a view never reaches the file)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b""
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def view(self, start: int, length: int) -> NDArray[np.uint8]:
        """The bytes start .. start+length, not copied."""
        return self._bytes[start : start + length]

    def read(self, start: int, length: int) -> bytes:
        return self._bytes[start : start + length].tobytes()

    def release(self, start: int, length: int) -> None:
        """Gives the memory of a range back; views of it stay valid and are read again from the file."""
        first = start - start % mmap.PAGESIZE
        if isinstance(self._map, mmap.mmap) and length:
            self._map.madvise(mmap.MADV_DONTNEED, first, start + length - first)


def digest_files(places: Mapping[Path, Iterable[int]]) -> str:
    """Identity of weight files: names, sizes, and bytes sampled all over each file, its head and end included.

    `places` has for each file where its tensors begin: there is a sample too, so that no tensor changes as a whole.
    """
    digest = hashlib.sha256()
    for path, starts in places.items():
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        spread = (max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1) for index in range(_SAMPLES))
        with path.open("rb") as file:
            for start in sorted({*spread, *starts}):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
