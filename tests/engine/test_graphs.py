"""Steps replayed from recordings: which are recorded, how they are padded, and that padding changes no token."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import CallingRecorder, RefillableKernels

from batchgen import kernels as op_tables
from batchgen.engine import Engine, Request, Sampling
from batchgen.engine import engine as engine_module
from batchgen.engine.graphs import (
    EAGER,
    MOST,
    Recorded,
    Recurrence,
    host_executor,
    out_of_memory,
    size_of,
)
from batchgen.engine.recorders import LARGEST_GRAPH, CudaRecorder, Size, padded_size


@given(st.integers(1, 4096))
def test_padding_is_small_and_sizes_are_few(rows):
    size = padded_size(rows)
    assert rows <= size <= max(2 * rows, 1) if rows <= 8 else rows <= size < rows + max(8, rows / 4)
    assert padded_size(size) == size
    assert padded_size(rows + 1) >= size
    assert len({padded_size(n) for n in range(1, 1025)}) <= MOST


def test_what_recurs_is_recorded_and_the_longest_unused_given_up():
    policy = Recurrence(after=3, most=2)
    assert [policy.recurs("a") for _ in range(4)] == [False, False, True, True]
    assert not policy.recurs("b")
    kept = {"a": 0, "b": 0, "c": 0}
    policy.recurs("c")
    policy.recurs("a")
    assert policy.surplus(kept) == ["b"]
    assert policy.surplus({"a": 0, "c": 0}) == []


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        return None


def test_every_capture_and_its_rehearsal_are_on_one_stream_of_the_recorder(monkeypatch):
    """Libraries keep scratch for each stream they have seen; the stream torch would take may be another device's."""
    used, made = [], []

    def stream() -> Stream:
        made.append(Stream())
        return made[-1]

    def graph(graph, *, pool, stream, capture_error_mode):
        assert pool == "pool"
        used.append(("captured", stream))
        return nullcontext()

    def current(stream):
        used.append(("current", stream))
        return nullcontext()

    default = Stream()
    fakes = {"Stream": stream, "graph": graph, "stream": current, "current_stream": lambda: default}
    fakes |= {"graph_pool_handle": lambda: "pool", "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = CudaRecorder()
    replays = [recorder.record(lambda: torch.ones(1), Size(1, 1)) for _ in range(2)]
    assert [replay(Size(1, 1)).item() for replay in replays] == [1, 1]
    (own,) = made
    assert used == [("current", own), ("captured", own), ("current", default)] * 2


def test_graphs_are_of_steps_that_memory_is_set_aside_for(monkeypatch):
    """States of all tokens may be asked for in steps of prompts as well."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "aside")
    recorder = CudaRecorder()
    assert recorder.size(Size(LARGEST_GRAPH, LARGEST_GRAPH)) == Size(LARGEST_GRAPH, LARGEST_GRAPH)
    assert recorder.size(Size(LARGEST_GRAPH + 1, LARGEST_GRAPH + 1)) is None
    assert recorder.size(Size(100, 4)) is None


def test_behind_a_capture_that_failed_others_have_a_pool_of_their_own(monkeypatch):
    """Torch leaves the pool of a void capture under way, and refuses to capture into it once more."""
    pools, given = iter(("first", "second")), []

    def graph(graph, *, pool, **options):
        given.append(pool)
        return nullcontext()

    fakes = {"Stream": Stream, "graph": graph, "stream": lambda stream: nullcontext(), "current_stream": Stream}
    fakes |= {"graph_pool_handle": lambda: next(pools), "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None)}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder, calls = CudaRecorder(), iter((1, lack_of_memory(), 3, 4))

    def call():
        outcome = next(calls)
        if isinstance(outcome, Exception):
            raise outcome
        return torch.ones(1)

    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(call, Size(1, 1))
    recorder.record(call, Size(1, 1))
    assert given == ["first", "second"]


PROMPTS = [tiny.random_prompt(3 + 5 * (at % 4), seed=at // 2) for at in range(11)]
SAMPLING = Sampling(max_tokens=14, temperature=0.9, seed=4)


def requests() -> list[Request]:
    return [Request(key, prompt, SAMPLING) for key, prompt in enumerate(PROMPTS)]


def load(folder, **settings) -> Engine:
    chosen = {"memory": "1MiB", "speculation": "off", "dtype": "float32", **settings}
    return Engine.load(str(folder), device="cpu", **chosen)


def answers(engine: Engine) -> dict:
    return {completion.key: completion.tokens for completion in engine.run(iter(requests()))}


@pytest.fixture
def recorder(monkeypatch) -> CallingRecorder:
    """Engines loaded from now on record their steps, one step ahead."""
    made = CallingRecorder()
    monkeypatch.setitem(engine_module.EXECUTORS, "cpu", lambda: Recorded(made))
    monkeypatch.setitem(engine_module.LOOK_AHEAD, "cpu", 1)
    monkeypatch.setattr(op_tables, "load", lambda device: RefillableKernels())
    return made


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize(
    "settings", [{"block_size": 4}, {"block_size": 16, "max_sequences": 5, "max_batch_tokens": 40}]
)
def test_recorded_steps_give_the_same_answers(tmp_path, family, settings, recorder, monkeypatch):
    folder = tiny.tiny_model(family, tmp_path)
    engine = load(folder, **settings)
    found = answers(engine)
    monkeypatch.undo()
    assert found == answers(load(folder))
    assert recorder.replayed >= engine.statistics.steps // 2
    assert recorder.recorded < recorder.replayed


def test_padding_writes_to_a_block_of_its_own(tmp_path, recorder):
    engine = load(tiny.tiny_model("llama3", tmp_path), block_size=4)
    pages, blocks = engine._runner.pages, engine._num_blocks
    assert pages.num_blocks == blocks + 1
    answers(engine)
    codes = pages.layer(0).keys.codes
    assert codes[:, blocks, 0].abs().sum() > 0
    assert codes[:, blocks, 1:].abs().sum() == 0


def test_recordings_are_bounded(tmp_path, recorder, monkeypatch):
    engine = load(tiny.tiny_model("llama3", tmp_path), block_size=4)
    executor = engine._runner.executor
    executor._recurrence = Recurrence(after=1, most=2)
    answers(engine)
    assert 1 <= len(executor._recordings) <= 2
    assert recorder.recorded > 2


def lack_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory")


def lack_of_memory_as_a_capture_ends() -> Exception:
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = lack_of_memory()
    return error


@pytest.mark.parametrize("fault", [lack_of_memory, lack_of_memory_as_a_capture_ends])
def test_without_memory_to_record_a_size_its_steps_are_launched_whole(tmp_path, recorder, monkeypatch, caplog, fault):
    folder = tiny.tiny_model("llama3", tmp_path)
    engine = load(folder, block_size=4)
    tried, steps = [], []
    real = type(engine._runner).start

    def fails(call, size):
        tried.append(call)
        raise fault()

    monkeypatch.setattr(recorder, "record", fails)
    monkeypatch.setattr(type(engine._runner), "start", lambda runner, feeds: steps.append(feeds) or real(runner, feeds))
    found = answers(engine)
    assert 1 <= len(tried) == len(engine._runner.executor._refused) == caplog.text.count("no memory to record")
    assert len(steps) == engine.statistics.steps  # none was tried again in halves
    monkeypatch.undo()
    assert found == answers(load(folder))


def test_other_faults_are_not_taken_for_a_lack_of_memory():
    assert out_of_memory(lack_of_memory())
    assert out_of_memory(lack_of_memory_as_a_capture_ends())
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("an illegal memory access"))


@pytest.mark.skipif(host_executor() is EAGER, reason="no native library was built")
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize(
    ("weights", "kv_cache"), [("native", "int8"), ("int8", "auto"), ("int4", "int4"), ("fp8", "fp8")]
)
def test_steps_played_from_tapes_give_the_same_answers(tmp_path, family, weights, kv_cache):
    settings = {"dtype": "bfloat16", "weights": weights, "kv_cache": kv_cache, "max_sequences": 5, "block_size": 4}
    engine = load(tiny.tiny_model(family, tmp_path), **settings)
    played, engine._runner.executor = engine._runner.executor, EAGER
    expected = answers(engine)
    engine._runner.executor = played
    assert answers(engine) == expected
    assert played._recordings
    assert not played._refused


@pytest.mark.skipif(host_executor() is EAGER, reason="no native library was built")
def test_steps_of_any_few_rows_are_played_from_one_tape(tmp_path):
    """Drafts make nearly every step one of its own size, which must not be launched call by call for that."""
    engine = load(tiny.tiny_model("llama3", tmp_path), dtype="bfloat16", speculation="ngram", block_size=4)
    answers(engine)
    sizes = {size for _, size in engine._runner.executor._recordings}
    assert Size(64, 64) in sizes
    assert {size.tokens for size in sizes} <= {64, 128, 256, 512}


@pytest.mark.skipif(host_executor() is EAGER, reason="no native library was built")
@pytest.mark.parametrize(("sequences", "chunk"), [(1, 7), (2, 40)])
def test_steps_with_prompts_are_played_from_tapes(tmp_path, sequences, chunk):
    """Of what they feed few rows are sampled, or none: those behind the last layer are counted by themselves."""
    settings = {"dtype": "bfloat16", "max_batch_tokens": chunk, "max_sequences": sequences, "block_size": 4}
    engine = load(tiny.tiny_model("llama3", tmp_path), **settings)
    played, engine._runner.executor = engine._runner.executor, EAGER
    expected, steps = answers(engine), []
    engine._runner.executor = played
    real = played.forward
    played.forward = lambda model, batch, pages: steps.append(size_of(batch)) or real(model, batch, pages)
    assert answers(engine) == expected
    assert any(size.sampled not in (0, size.tokens) for size in steps)
    assert sequences > 1 or any(size.sampled == 0 for size in steps)
    assert Size(64, 65) in {size for _, size in played._recordings}


@pytest.mark.skipif(host_executor() is EAGER, reason="no native library was built")
def test_what_torch_computes_is_not_recorded(tmp_path):
    engine = load(tiny.tiny_model("llama3", tmp_path))
    answers(engine)
    assert not engine._runner.executor._recordings
    assert engine._runner.executor._refused
