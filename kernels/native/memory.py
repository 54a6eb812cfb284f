"""Memory on large pages where the system grants them, before it is used and after. Knows bytes, not what they hold.

A step reads every weight once. On pages of 4 KiB its products wait for addresses to be looked up: the linears of a
decode step take an eighth longer.
"""

import ctypes
import mmap
import sys
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

CHUNK = 32 << 20  # asked of the system at once; what is never touched takes no memory
LINE = 64
MADV_POPULATE_WRITE = 23  # of Linux, since 5.14
PIECE = 2 << 20  # populated by one call: others that ask for memory meanwhile wait for its end


class LargePages:
    """Tensors side by side in a few big pieces of memory, each freed when the last of its tensors is."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at the start of a cache line, its contents undefined."""
        return self._take(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def _take(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // LINE) * LINE
        if size > CHUNK:
            return _ask(size)[:num_bytes]
        if size > len(self._free):
            self._free = _ask(CHUNK)
        taken, self._free = self._free[:num_bytes], self._free[size:]
        return taken


def _ask(num_bytes: int) -> Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # Python was built on a system that has them, this one was not
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def populate(memory: Tensor) -> None:
    """Has the system find the pages of a contiguous tensor now, whatever they hold, not when each is first used.

    It may be in use meanwhile. Where the system knows no such request pages come when used.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    for start in range(begin, end, PIECE):
        size = min(PIECE, end - start)
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_POPULATE_WRITE):
            return


def give_back() -> None:
    """Has the C library return to the system what is free, where it can.

    By itself it keeps up to 64 MiB, and more between what is used: after a load as much as the weights take.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
