"""Memory on large pages: tensors that lie side by side and stay as long as one of them is used."""

import mmap

import pytest
import torch
from torch import Tensor

from batchgen.kernels.native.memory import CHUNK, LINE, LargePages

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
