"""The op table of CUDA devices as it is made for a device that is not here."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from batchgen.kernels import tables

FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def matmul() -> Iterator[Any]:
    """The flags of the vendor's products, put back afterwards."""
    flags = torch.backends.cuda.matmul
    before = [getattr(flags, name) for name in FLAGS]
    yield flags
    for name, value in zip(FLAGS, before, strict=True):
        setattr(flags, name, value)


def test_parts_of_the_vendors_sums_are_float32(matmul: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    monkeypatch.setattr("batchgen.kernels.gpu_table.GpuKernels", lambda tuned: tuned)
    monkeypatch.delenv("BATCHGEN_TUNED", raising=False)
    for name in FLAGS:
        setattr(matmul, name, True)
    tables.gpu_kernels.__wrapped__()
    assert [getattr(matmul, name) for name in FLAGS] == [False, False]
