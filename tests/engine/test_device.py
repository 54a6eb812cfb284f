"""Which device `engine.device` comes to, and what a device that cannot be used is refused with."""

import pytest
import torch

from batchgen.engine import device
from batchgen.engine.checkpoint import ModelError
from batchgen.engine.device import Cuda, choose_device, find_cuda, find_place, resolve_device
from batchgen.engine.processor import Place, likely_place, processor_name

H200, T4 = ("NVIDIA H200", (9, 0)), ("Tesla T4", (7, 5))


@pytest.mark.parametrize(
    ("name", "cuda", "expected"),
    [
        ("cpu", Cuda(None, (H200,)), "cpu"),
        ("auto", Cuda(None, (H200,)), "cuda:0"),
        ("cuda", Cuda(None, (H200, H200)), "cuda:0"),
        ("cuda:1", Cuda(None, (H200, H200)), "cuda:1"),
        ("auto", Cuda("no driver"), "cpu"),
        ("auto", Cuda(None, (T4,)), "cpu"),
        ("auto", Cuda(None, (T4, H200)), "cuda:1"),
        ("cuda", Cuda(None, (H200, T4)), "cuda:0"),
        ("auto", Cuda(None, (H200,), triton=False), "cpu"),
    ],
)
def test_what_a_name_comes_to(name, cuda, expected):
    assert choose_device(name, cuda) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "cuda", "reason"),
    [
        ("cuda", Cuda("CUDA does not start: no driver"), "cuda cannot be used: CUDA does not start: no driver"),
        ("cuda:1", Cuda(None, (H200,)), "cuda:1 cannot be used: there is 1 CUDA device, numbered from 0"),
        ("cuda:7", Cuda(None, (H200, H200)), "there are 2 CUDA devices, numbered from 0"),
        ("cuda", Cuda(None, (T4,)), "Tesla T4 has compute capability 7.5, the kernels need 8.0"),
        ("cuda:0", Cuda(None, (H200,), triton=False), "the kernels need Triton: pip install triton"),
    ],
)
def test_a_named_device_works_or_says_why_not(name, cuda, reason):
    with pytest.raises(ModelError) as refused:
        choose_device(name, cuda)
    assert str(refused.value).startswith("engine.device: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_this_machine_is_looked_at(caplog):
    found = find_cuda()
    assert (found.fault is None) == torch.cuda.is_available()
    with caplog.at_level("INFO"):
        taken = resolve_device("auto")
    assert (taken.type == "cuda") == any(found.refusal(index) is None for index in range(len(found.devices)))
    assert "engine.device: auto is" in caplog.text


def test_the_card_that_is_taken_gives_its_name(monkeypatch):
    monkeypatch.setattr(device, "find_cuda", lambda: Cuda(None, (T4, H200)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: f"card {place.index}")
    assert find_place("cuda:1") == Place("cuda", "card 1")
    assert find_place("cpu") == likely_place("cpu") == Place("cpu", processor_name())


def test_a_torch_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelError, match=f"torch {torch.__version__} is built without CUDA".replace("+", r"\+")):
        resolve_device("cuda")


def test_a_driver_that_does_not_start_says_so(monkeypatch):
    def fails():
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fails)
    with pytest.raises(
        ModelError, match=r"cannot be used: CUDA does not start: Found no NVIDIA driver on your system\.$"
    ):
        resolve_device("cuda")
