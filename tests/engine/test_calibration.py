"""Micro-runs: constants for every format of a small model, and none at all beside other work."""

import time
from types import SimpleNamespace

import pytest
import tiny
import torch
from recorded import CallingRecorder, RefillableKernels

from batchgen import kernels
from batchgen.engine import calibration
from batchgen.engine.calibration import DisturbedError, Timer, TooLongError, calibrate, measure_rates, rising
from batchgen.engine.decoder import Decoder
from batchgen.engine.graphs import Recorded
from batchgen.engine.models import architecture
from batchgen.engine.rates import DEVICES, FORMATS

CPU = torch.device("cpu")
OPS = kernels.load("cpu")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch) -> None:
    monkeypatch.setattr(calibration, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(calibration, "SIZES", (1, 40))
    monkeypatch.setattr(calibration, "DRAWN", (1, 8))


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    from batchgen.engine.checkpoint import open_checkpoint

    config = open_checkpoint(str(tiny.tiny_model("qwen3", tmp_path_factory.mktemp("qwen3")))).config
    return architecture(config).spec(config)


ASKED = {"float32", "bfloat16", "float16", "fp8", "int8", "int4"}  # KV formats of jobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format_is_measured(spec, dtype) -> None:
    rates = measure_rates(spec, OPS, dtype, Timer(CPU))
    own = str(dtype).removeprefix("torch.")
    assert set(rates.layers) == set(rates.head) == set(FORMATS)
    assert set(rates.own_pair) == set(rates.shared_pair) == set(rates.kv_bytes) == ASKED
    assert rates.basis == "measured"
    assert rates.step == DEVICES["cpu"].step_seconds
    assert rates.kv_bytes[own] == 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    for curve in (*rates.layers.values(), *rates.head.values()):
        assert 0 < curve.seconds[0] <= curve.seconds[-1]
    assert set(rates.sharing) == set(rates.own_pair)
    assert all(value > 0 for value in (*rates.own_pair.values(), *rates.shared_pair.values()))


class Clock(CallingRecorder):
    """A recorder whose replays take a second each, where a forward pass that is launched takes a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._forward = Decoder.forward

    def forward(self, model, batch, pages):
        self.now += 100.0
        return self._forward(model, batch, pages)

    def record(self, call, size):
        replay = super().record(call, size)

        def timed(step):
            before = self.now
            out = replay(step)
            self.now = before + 1.0
            return out

        return timed


def test_steps_that_recur_are_timed_as_they_are_run(spec, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(Decoder, "forward", lambda model, batch, pages: clock.forward(model, batch, pages))
    monkeypatch.setitem(calibration.EXECUTORS, "cpu", lambda: Recorded(clock))
    monkeypatch.setitem(calibration.AT_ONCE, "cpu", calibration.AT_ONCE["cuda"])
    monkeypatch.setattr(calibration, "MOST_RECORDED", 30)
    monkeypatch.setattr(calibration, "SIZES", (1, 11, 40))
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    kernels = RefillableKernels()
    decoder = calibration.random_decoder(spec, "native", kernels, torch.float32, CPU)
    few = decoder.spec.num_layers
    assert calibration._Bench(decoder, kernels, Timer(CPU)).layers(few).seconds == (1.0, 1.0, 100.0)
    assert clock.recorded == 2


def test_noise_does_not_make_more_work_faster() -> None:
    assert rising([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 1.0, 2.0, 4.0, 4.0)


def test_micro_runs_that_take_too_long_say_nothing(spec) -> None:
    with pytest.raises(TooLongError, match="too long"):
        calibrate(spec, OPS, torch.float32, CPU, seconds=0.0)


@pytest.fixture
def others_at_work(monkeypatch) -> None:
    class Times(tuple):
        idle = 0.0

    monkeypatch.setattr(
        calibration, "psutil", SimpleNamespace(cpu_times=lambda: Times([1e3 * time.time()]), cpu_count=lambda: 2)
    )


def test_beside_other_work_micro_runs_say_nothing(spec, others_at_work) -> None:
    with pytest.raises(DisturbedError, match="other programs used"):
        calibrate(spec, OPS, torch.float32, CPU, seconds=60.0)


def test_other_work_ends_them_at_once_and_is_the_reason_even_out_of_time(spec, others_at_work, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "FIRST_LOOK", 0.0)
    monkeypatch.setattr(calibration, "rising", lambda _: pytest.fail("a whole curve was measured"))
    with pytest.raises(DisturbedError, match="other programs used") as ended:
        calibrate(spec, OPS, torch.float32, CPU, seconds=0.0)
    assert not isinstance(ended.value, TooLongError)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_without_memory_micro_runs_say_nothing(spec, monkeypatch, error) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(calibration, "random_decoder", full)
    with pytest.raises(DisturbedError, match=r"^the micro-runs found too little memory$"):
        calibrate(spec, OPS, torch.float32, CPU, seconds=60.0)
