"""The op table of CUDA devices as it is made for a device that is not here."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.kernels import load, tables
from batchgen.kernels.chip import Chip

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
    monkeypatch.setattr("batchgen.kernels.gpu_table.GpuKernels", lambda chip, tuned: tuned)
    monkeypatch.setattr(tables, "chip_of", lambda card: Chip())
    monkeypatch.delenv("BATCHGEN_TUNED", raising=False)
    for name in FLAGS:
        setattr(matmul, name, True)
    tables.kernels_of_card.__wrapped__(0)
    assert [getattr(matmul, name) for name in FLAGS] == [False, False]


def test_each_card_has_the_table_of_its_own_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name="A100", major=8, minor=0, multi_processor_count=108)]
    cards += [SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: cards[index].name)
    monkeypatch.setattr(tables, "read_tuned", lambda path, name: {name: "tuned"})
    tables.kernels_of_card.cache_clear()
    first, second, current = load("cuda:0"), load("cuda:1"), load("cuda")
    tables.kernels_of_card.cache_clear()
    assert [made.choices.chip.multiprocessors for made in (first, second)] == [108, 132]
    assert [list(made.choices.tuned) for made in (first, second)] == [["A100"], ["H200"]]
    assert current is second
