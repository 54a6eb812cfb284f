"""The whole way of rows with a stand-in engine: every row once, at its position, whatever goes wrong."""

import gc
import random
import threading
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import source_of, write_parquet
from stand_ins import ByteTokenizer, EchoEngine

from batchgen.engine.request import Completion, Request, Sample, Sampling, TokenLogprob
from batchgen.pipeline.config import PromptSettings
from batchgen.pipeline.flow import answers
from batchgen.pipeline.prompt import PromptError, Renderer
from batchgen.pipeline.result import ResultEncoder
from batchgen.pipeline.rows import RowBatch, Skipped
from batchgen.pipeline.windows import WindowBudget


def run(
    base: Path,
    path: Any,
    engine: EchoEngine,
    prompt: dict[str, Any] | None = None,
    max_tokens: int = 5,
    **more: Any,
) -> Generator[pa.RecordBatch, None, None]:
    sampling = Sampling(max_tokens=max_tokens)
    settings = PromptSettings.model_validate(prompt or {"text": "{{ x }}"})
    renderer = Renderer(settings, sampling, {}, engine.tokenizer, engine.context_length, "2026-01-01")
    encoder = ResultEncoder(engine.tokenizer, sampling, engine.eos_ids)
    return answers(source_of(base, path), renderer, engine, encoder, directory=base, **more)


def collect(batches: Iterable[pa.RecordBatch]) -> dict[int, Any]:
    """Completion or error code by position; fails when a row comes twice."""
    found: dict[int, Any] = {}
    for batch in batches:
        for row in batch.to_pylist():
            assert row["position"] not in found
            found[row["position"]] = row["error"]["code"] if row["error"] else row["completion"]
    return found


class ShufflingEngine(EchoEngine):
    """Holds up to 40 requests and finishes them in random order, late."""

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        noise = random.Random(len(self.seen))
        held: list[Request] = []
        for request in requests:
            held.append(request)
            while len(held) > noise.randint(0, 40):
                yield from super().run([held.pop(noise.randrange(len(held)))])
        while held:
            yield from super().run([held.pop(noise.randrange(len(held)))])


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_every_row_once_whatever_the_order(tmp_path: Path, rows: int) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number:04d}" for number in range(300)]}, 64)
    engine = ShufflingEngine()
    found = collect(run(tmp_path, "0.parquet", engine, budget=WindowBudget(rows=rows)))
    assert found == {number: f"{number:04d}" for number in range(300)}


def test_one_row_ten_contexts_long(tmp_path: Path) -> None:
    texts = [f"row{number:04d}" for number in range(100)]
    texts[57] = "x" * 1000
    write_parquet(tmp_path / "0.parquet", {"x": texts})
    found = collect(run(tmp_path, "0.parquet", EchoEngine(context_length=100)))
    assert found.pop(57) == "context_length"
    assert found == {number: f"{number:04d}" for number in range(100) if number != 57}


def test_bad_lines_nulls_and_poison_are_their_rows_errors(tmp_path: Path) -> None:
    lines = ['{"x": "row0"}', "broken", '{"x": null}', '{"x": "poison"}', '{"x": ""}', '{"x": "row5"}']
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    engine = EchoEngine(ByteTokenizer(poison="poison"))
    expected = {0: "row0", 1: "bad_row", 2: "null_value", 3: "template", 4: "empty_prompt", 5: "row5"}
    assert collect(run(tmp_path, "0.jsonl", engine)) == expected


def test_skipped_rows_are_told_and_done_rows_are_not_asked(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": ["a", None, "c", None, "e"]})
    skipped: list[Skipped] = []
    engine = EchoEngine()
    batches = run(
        tmp_path,
        "0.parquet",
        engine,
        {"text": "{{ x }}", "on_null": "skip"},
        done=lambda position: position in (0, 3),
        skip=skipped.extend,
    )
    assert collect(batches) == {2: "c", 4: "e"}
    assert skipped == [Skipped(1, "column 'x' is null", "on_null")]
    assert sorted(engine.seen) == [2, 4]


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": ["a"]})
    with pytest.raises(PromptError, match="the input has no column 'y', only x"):
        collect(run(tmp_path, "0.parquet", EchoEngine(), {"text": "{{ y }}"}))


class BrokenEngine(EchoEngine):
    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        yield next(iter(super().run(requests)))
        raise MemoryError("out of memory")


class LosingEngine(EchoEngine):
    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        return (completion for completion in super().run(requests) if completion.key != 3)


class SwappingEngine(EchoEngine):
    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        first, second, *_ = super().run(requests)
        yield Completion(first.key, second.samples, tag=second.tag)


class RepeatingEngine(EchoEngine):
    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        for completion in super().run(requests):
            yield completion
            yield completion


@pytest.mark.parametrize(
    ("engine", "error", "message"),
    [
        (BrokenEngine(), MemoryError, "out of memory"),
        (LosingEngine(), RuntimeError, "no answer for 1 rows, among them row 3"),
        (SwappingEngine(), RuntimeError, "not waiting for an answer"),
        (RepeatingEngine(), RuntimeError, "not waiting for an answer"),
    ],
)
def test_what_goes_wrong_in_the_engine_is_raised(
    tmp_path: Path, engine: EchoEngine, error: type[Exception], message: str
) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number}" for number in range(10)]})
    with pytest.raises(error, match=message):
        collect(run(tmp_path, "0.parquet", engine))
    assert [path.name for path in tmp_path.iterdir()] == ["0.parquet"]
    assert not any(thread.name == "batchgen-ahead" for thread in threading.enumerate())


def test_leaving_early_ends_threads_and_removes_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number}" for number in range(5000)]}, 100)
    batches = run(tmp_path, "0.parquet", EchoEngine(), budget=WindowBudget(rows=100))
    next(batches)
    batches.close()
    assert [path.name for path in tmp_path.iterdir()] == ["0.parquet"]
    assert not any(thread.name == "batchgen-ahead" for thread in threading.enumerate())


class SlowEngine(EchoEngine):
    """Finishes one row and then waits: what is finished must come out all the same."""

    gate = threading.Event()

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        for completion in super().run(requests):
            yield completion
            self.gate.wait(20)


def test_a_finished_row_does_not_wait_for_the_next(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": ["row0", "row1"]})
    batches = run(tmp_path, "0.parquet", SlowEngine())
    assert next(batch.num_rows for batch in batches if batch.num_rows) == 1
    SlowEngine.gate.set()
    assert sum(batch.num_rows for batch in batches) == 1


class SteppingEngine(EchoEngine):
    """Answers two rows, then one more at the end of a step that only an interrupt shortens; the rest never."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = threading.Event()
        self.cut_short = threading.Event()
        self.closed = threading.Event()

    def interrupt(self) -> None:
        self.cut_short.set()

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        first, second, third = islice(super().run(requests), 3)
        try:
            yield first
            yield second
            self.stepping.set()
            self.cut_short.wait(60)
            yield third
        finally:
            self.closed.set()


def test_ticks_come_while_nothing_finishes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": ["row0", "row1", "row2"]})
    engine = SteppingEngine()
    batches = run(tmp_path, "0.parquet", engine)
    while not engine.stepping.is_set():
        next(batches)
    next(batches)
    tick = next(batches)
    assert (tick.num_rows, "completion" in tick.schema.names) == (0, True)
    engine.interrupt()
    assert len(collect(batches)) == 1


def test_a_wish_to_stop_ends_the_step_and_keeps_what_has_finished(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number}" for number in range(9)]})
    engine = SteppingEngine()
    found = collect(run(tmp_path, "0.parquet", engine, stopping=engine.stepping.is_set))
    assert found == {0: "row0", 1: "row1", 2: "row2"}
    assert engine.closed.is_set()
    assert [path.name for path in tmp_path.iterdir()] == ["0.parquet"]


def test_a_step_that_cannot_be_cut_short_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StubbornEngine(SteppingEngine):
        def interrupt(self) -> None: ...

    monkeypatch.setattr("batchgen.pipeline.flow._STOP_SECONDS", 0.1)
    monkeypatch.setattr("batchgen.pipeline.background._JOIN_SECONDS", 0.1)
    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number}" for number in range(9)]})
    engine = StubbornEngine()
    assert set(collect(run(tmp_path, "0.parquet", engine, stopping=engine.stepping.is_set))) == {0, 1}
    engine.cut_short.set()
    assert engine.closed.wait(20)


@pytest.mark.parametrize("way", ["close", "error"])
def test_leaving_interrupts_the_step(tmp_path: Path, way: str) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number}" for number in range(50)]})
    engine = SteppingEngine()
    batches = run(tmp_path, "0.parquet", engine)
    while not engine.stepping.is_set():
        next(batches)
    if way == "close":
        batches.close()
    else:
        with pytest.raises(OSError, match="disk full"):
            batches.throw(OSError("disk full"))
    assert engine.cut_short.is_set()
    assert engine.closed.is_set()
    assert not any(thread.name == "batchgen-ahead" for thread in threading.enumerate())


def test_an_engine_that_is_done_is_not_interrupted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", {"x": ["row0"]})
    engine = EchoEngine()
    for _ in range(2):
        assert collect(run(tmp_path, "0.parquet", engine)) == {0: "row0"}
    assert not engine.interrupted


def test_skipped_rows_wait_in_lists_and_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.pipeline.flow._SKIPPED_AHEAD", 50)
    rendered: list[int] = []
    render = Renderer.render

    def counting(self: Renderer, batch: RowBatch, *more: Any) -> Any:
        rendered.append(batch.num_rows)
        return render(self, batch, *more)

    monkeypatch.setattr(Renderer, "render", counting)
    write_parquet(tmp_path / "0.parquet", {"x": pa.array([None] * 1000 + ["end"], pa.string())})
    told: list[list[Skipped]] = []
    batches = run(tmp_path, "0.parquet", EchoEngine(), {"text": "{{ x }}", "on_null": "skip"}, skip=told.append)
    next(batches)
    before = sum(rendered) - sum(map(len, told))
    threading.Event().wait(0.1)
    assert before <= 80
    assert sum(rendered) - sum(map(len, told)) <= 80
    assert collect(batches) == {1000: "end"}
    assert [row.position for rows in told for row in rows] == list(range(1000))
    assert len(told) <= 101


def test_waiting_answers_are_bounded_by_their_tokens(tmp_path: Path) -> None:
    """Answers of 10,000 tokens with 20 alternatives each: a few wait, not thousands."""

    class TalkingEngine(EchoEngine):
        def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
            entry = TokenLogprob(65, -1.0, ((65, -1.0),) * 20)
            sample = Sample([65] * 10_000, "length", [entry] * 10_000)
            for request in requests:
                self.seen.append(request.key)
                yield Completion(request.key, (sample,), tag=request.tag)

    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number}" for number in range(100)]})
    engine = TalkingEngine()
    batches = run(tmp_path, "0.parquet", engine)
    first = next(batches)
    threading.Event().wait(0.1)
    assert first.num_rows <= 1
    assert len(engine.seen) < 10
    batches.close()


def test_objects_do_not_pile_up(tmp_path: Path) -> None:
    """20,000 rows: only what is being rendered, and a few requests more, are Python objects at once."""
    write_parquet(tmp_path / "0.parquet", {"x": [f"row{number}" for number in range(20_000)]}, 1000)
    alive: list[int] = []

    class CountingEngine(EchoEngine):
        def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
            for number, completion in enumerate(super().run(requests)):
                if number % 5000 == 2500:
                    alive.append(sum(type(thing) is Request for thing in gc.get_objects()))
                yield completion

    assert len(collect(run(tmp_path, "0.parquet", CountingEngine()))) == 20_000
    assert len(alive) == 4
    assert max(alive) < 2100  # two row groups


def test_the_tokenizer_works_on_lists_in_another_thread(tmp_path: Path) -> None:
    table = pa.table({"x": [f"row{number}" for number in range(9000)]})
    pq.write_table(table, tmp_path / "0.parquet")
    tokenizer = ByteTokenizer()
    collect(run(tmp_path, "0.parquet", EchoEngine(tokenizer)))
    assert max(tokenizer.calls) > 1000
    assert len(tokenizer.calls) < 10


def test_the_first_answer_does_not_wait_for_all_rows(tmp_path: Path) -> None:
    """With no patience at all, one small batch has been rendered when the engine gets its first request."""
    pq.write_table(pa.table({"x": [f"row{number}" for number in range(60_000)]}), tmp_path / "0.parquet")
    engine = EchoEngine()
    batches = run(tmp_path, "0.parquet", engine, budget=WindowBudget(patience=-1.0))
    first = next(batch for batch in batches if batch.num_rows)
    assert first.column("position").to_pylist()[0] == 0
    batches.close()
    assert engine.tokenizer.calls[2] == 256
