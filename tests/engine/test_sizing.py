"""KV memory beside weights and steps: the largest step is run once, and its peak left free."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

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
from batchgen.kernels import Kernels
from batchgen.kernels.tables import ReferenceKernels

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


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    folder = tiny.tiny_model("llama3", tmp_path_factory.mktemp("model"))
    return Engine.load(str(folder), device="cpu", dtype="float32", memory="1MiB")


def runner_of(engine: Engine, num_blocks: int, ops: Kernels | None = None) -> Runner:
    real = engine._runner
    pages = KVPages(engine.model.kv_shape(), num_blocks, 16, torch.device("cpu"))
    sampler = real.sampler if ops is None else replace(real.sampler, kernels=ops)
    return Runner(real.model, real.kernels, pages, sampler, real.sharing)


class Still:
    """A meter that reads nothing."""

    def peak(self) -> int:
        return 0


@pytest.mark.parametrize("what", ["pages", "step"])
def test_a_step_that_does_not_fit_is_refused_not_halved(engine, monkeypatch, what):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.model, "forward", fails)
    monkeypatch.setattr(sizing, "AllocatorMeter", lambda device: Still())
    made = fails if what == "pages" else lambda blocks: runner_of(engine, blocks)
    with pytest.raises(ModelError, match=r"engine\.max_batch_tokens: a step of 50 tokens .* lower it") as refused:
        sizing.WORKING_BYTES["cuda"](made, 50, 7, 16)
    assert "\n" not in str(refused.value)


def test_a_fault_of_the_measured_step_is_seen(engine, monkeypatch):
    def forward(batch, pages):
        raise ValueError("no such kernel")

    monkeypatch.setattr(engine.model, "forward", forward)
    step = largest_step(5, 1, 16)
    with pytest.raises(ValueError, match="no such kernel"):
        working_bytes(runner_of(engine, blocks_of(step)), step, Still())


def test_the_largest_step_copies_logits_for_penalties_and_log_probabilities(engine):
    called = Counter()

    class Watched(ReferenceKernels):
        def penalise(self, logits, penalties):
            called["penalised"] += len(logits)
            assert len(penalties.rows) >= len(logits)
            return super().penalise(logits, penalties)

        def logprobs(self, logits, tokens, top):
            called["log-probabilities"] += len(logits)
            return super().logprobs(logits, tokens, top)

        def sample(self, logits, filters):
            called["filtered"] += int((filters.top_p < 1).sum())
            return super().sample(logits, filters)

    step = largest_step(50, 7, 16)
    working_bytes(runner_of(engine, blocks_of(step), Watched()), step, Still())
    assert called == {"penalised": 14, "log-probabilities": 14, "filtered": 14}


def test_room_is_left_for_what_recordings_of_steps_keep(monkeypatch):
    seen = []

    def working(runner, step, meter):
        seen.append((step.num_tokens, len(step.feeds), sum(feed.num_points for feed in step.feeds)))
        return 1000 * len(seen)

    monkeypatch.setattr(sizing, "working_bytes", working)
    monkeypatch.setattr(sizing, "AllocatorMeter", lambda device: None)
    made = sizing.WORKING_BYTES["cuda"](lambda blocks: SimpleNamespace(device=CUDA), 300, 20, 16)
    assert seen == [(300, 20, 20), (300, 300, 0)]
    assert made == 3000


def test_it_runs_and_its_peak_is_what_the_meter_says(engine):
    step = largest_step(50, 7, 16)
    runner, calls = runner_of(engine, blocks_of(step)), []
    pages = runner.pages

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
