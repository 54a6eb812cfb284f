"""Memory on large pages: tensors that lie side by side and stay as long as one of them is used."""

import ctypes
import mmap
import sys
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from batchgen.kernels.native import memory as native_memory
from batchgen.kernels.native.memory import CHUNK, LINE, LargePages, give_back, populate

NO_SUCH_ADVICE = 4711


@pytest.fixture(params=["large pages", "a system without them", "a system that refuses them"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LargePages:
    if request.param == "a system without them":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    elif not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no large pages")
    elif request.param == "a system that refuses them":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", NO_SUCH_ADVICE)
    return LargePages()


SHAPES = [(3, 5), (0, 4), (1,), (7, 16, 4), (CHUNK + 1,), (CHUNK // 2 + 1,), (CHUNK // 2,)]


def test_tensors_do_not_overlap(memory: LargePages) -> None:
    tensors = [memory.empty(shape, torch.uint8) for shape in SHAPES]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, SHAPES, strict=True)):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % LINE == 0
        assert bool((tensor == number).all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_a_copy_is_contiguous(memory: LargePages, dtype: torch.dtype) -> None:
    turned = torch.arange(60).view(5, 12).to(dtype).T
    copy = memory.copy(turned)
    assert copy.is_contiguous()
    assert copy.dtype == dtype
    assert torch.equal(copy, turned)


def test_tensors_outlive_what_gave_them(memory: LargePages) -> None:
    def one(value: float) -> Tensor:
        return LargePages().copy(torch.full((1000,), value))

    first, second = one(1.0), one(2.0)
    assert first.sum() == 1000
    assert second.sum() == 2000


SIZE = 5 << 20


def untouched() -> Tensor:
    """In pages of the smallest size, whatever the system grants of itself."""
    pages = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def present(tensor: Tensor) -> list[bool]:
    """Which pages of a tensor at the start of one the system has found memory for."""
    pages = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages) == 0
    return [bool(page & 1) for page in pages]


def populates() -> bool:
    """The system knows the request, and tells which pages there are."""
    if sys.platform != "linux":
        return False
    memory = untouched()
    if any(present(memory)):
        return False
    start, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(mmap.PAGESIZE)
    return ctypes.CDLL(None).madvise(start, size, native_memory.MADV_POPULATE_WRITE) == 0


@pytest.mark.skipif(not populates(), reason="a system without the request")
def test_memory_is_found_for_what_is_populated_and_keeps_what_it_holds() -> None:
    memory = untouched()
    memory[9] = 7
    assert sum(present(memory)) == 1
    part = memory[5 : 3 << 20]
    populate(part)
    pages = present(memory)
    assert all(pages[: (3 << 20) // mmap.PAGESIZE - 1])
    assert not any(pages[(3 << 20) // mmap.PAGESIZE :])
    assert memory.sum() == 7


@pytest.mark.parametrize("system", ["another", "one that refuses"])
def test_memory_is_as_good_where_it_cannot_be_populated(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if system == "another":
        monkeypatch.setattr(sys, "platform", "win32")
    else:
        monkeypatch.setattr(native_memory, "MADV_POPULATE_WRITE", NO_SUCH_ADVICE)
    memory = untouched()
    populate(memory)
    assert memory.sum() == 0


BLOCK, COUNT = 64 << 10, 1000


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_what_is_free_between_what_is_used_is_given_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    kept = blocks.pop()
    for block in blocks:
        library.free(block)
    before = resident()
    give_back()
    after = resident()
    library.free(kept)
    assert before - after > BLOCK * COUNT * 0.9


def test_a_library_that_cannot_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back()


def resident() -> int:
    """Bytes of this process that are no file's."""
    with open("/proc/self/status", encoding="utf-8") as status:
        found = [int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")]
    return found[0] if found else pytest.skip("this system does not tell")
