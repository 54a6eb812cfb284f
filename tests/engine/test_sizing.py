"""KV memory beside weights and steps: the largest step is run once, and its peak left free."""

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine import Engine, sizing
from batchgen.engine import engine as engine_module
from batchgen.engine.checkpoint import ModelError
from batchgen.engine.config import EngineSettings
from batchgen.engine.kv import KVPages
from batchgen.engine.runner import Runner
from batchgen.engine.sizing import blocks_of, kv_cache_bytes, largest_step, working_bytes

CUDA = torch.device("cuda", 0)


@given(tokens=st.integers(1, 500), sequences=st.integers(1, 60), block_size=st.integers(1, 32))
def test_the_largest_step_has_every_token_and_every_sequence(tokens, sequences, block_size):
    step = largest_step(tokens, min(tokens, sequences), block_size)
    assert step.num_tokens == tokens
    assert len(step.feeds) == min(tokens, sequences)
    assert all(feed.num_points == 1 for feed in step.feeds)
    blocks = [block for feed in step.feeds for block in feed.sequence.blocks]
    assert sorted(blocks) == list(range(blocks_of(step)))
    assert all(len(feed.sequence.blocks) * block_size >= feed.count for feed in step.feeds)


def test_it_runs_and_its_peak_is_what_the_meter_says(tmp_path):
    engine = Engine.load(str(tiny.tiny_model("llama3", tmp_path)), device="cpu", dtype="float32", memory="1MiB")
    step = largest_step(50, 7, 16)
    real = engine._runner
    pages = KVPages(engine.model.kv_shape(), blocks_of(step), 16, torch.device("cpu"))
    runner, calls = Runner(real.model, real.kernels, pages, real.sampler), []

    class Meter:
        def peak(self) -> int:
            calls.append(float(pages.layer(0).keys.codes.abs().sum()))
            return 1000 * len(calls)

    assert working_bytes(runner, step, Meter()) == 3000
    assert calls[0] == 0.0
    assert calls[1] > 0.0


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("auto", int(0.9 * 70)), (0.5, 35), (1.0, 70), (2048, 2048)],
)
def test_a_share_is_of_what_weights_and_steps_leave(monkeypatch, memory, expected):
    scale = 2**20
    monkeypatch.setattr(sizing, "free_memory", lambda device: 100 * scale)
    wanted = expected * scale if memory != 2048 else expected
    assert kv_cache_bytes(memory, CUDA, 30 * scale) == pytest.approx(wanted, abs=scale)


def test_more_than_a_gpu_has_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(sizing, "free_memory", lambda device: 8 * 2**30)
    with pytest.raises(
        ModelError, match=r"engine\.memory: 7GiB, but beside weights and steps cuda:0 has 6\.0 GiB free"
    ):
        kv_cache_bytes("7GiB", CUDA, 2 * 2**30)


def test_on_a_cpu_auto_is_a_quarter_and_bounded(monkeypatch):
    monkeypatch.setattr(sizing, "free_memory", lambda device: 8 * 2**30)
    assert kv_cache_bytes("auto", torch.device("cpu"), 0) == 2 * 2**30
    monkeypatch.setattr(sizing, "free_memory", lambda device: 80 * 2**30)
    assert kv_cache_bytes("auto", torch.device("cpu"), 0) == 4 * 2**30


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_sequences"])
def test_limits_without_a_job_are_told_for_every_kind_of_device(name):
    limits = getattr(engine_module, name.upper())
    told = EngineSettings.model_fields[name].description
    assert f"without a job: {limits['cpu']}, on a GPU {limits['cuda']}" in told
