"""An engine made of workers: every row once, whoever dies, stops or fails; shown with workers in threads."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_models import FakeEngine

from batchgen.engine.request import Completion, Request, RowError, Sampling, Usage
from batchgen.engine.statistics import Statistics
from batchgen.jobs.cluster.engine import ClusterEngine, Facts, Progress, WorkerLostError, past
from batchgen.jobs.cluster.session import WorkerSession
from batchgen.jobs.errors import JobError


class CountingEngine(FakeEngine):
    """A fake engine whose statistics are the real ones."""

    def _run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        self.statistics = Statistics()
        yield from super()._run(requests)


@dataclass
class LocalWorker:
    """A worker in this process; dies when it has been asked `lives` times."""

    engine: FakeEngine
    lives: float = float("inf")
    never: bool = False  # it never gets a machine
    dies_loading: bool = False
    session: WorkerSession = field(init=False)

    def __post_init__(self) -> None:
        self.session = WorkerSession(self.engine)

    def facts(self, seconds: float) -> Facts | None:
        if self.never:
            time.sleep(0.01)
            return None
        if self.dies_loading:
            raise WorkerLostError("no such library")
        return self.session.facts()

    def begin(self) -> None:
        self.session.begin()

    def interrupt(self) -> None:
        self.session.interrupt()

    def advance(self, requests: Sequence[Request], low: int, last: bool) -> Progress:
        self.lives -= 1
        if self.lives < 0:
            self.session.interrupt()
            raise WorkerLostError("killed")
        return self.session.advance(requests, low, last)


def cluster(hire: Callable[[int], LocalWorker], workers: int = 2) -> ClusterEngine:
    return ClusterEngine(tokenizer=None, hire=hire, num_workers=workers)


def rows(count: int) -> list[Request]:
    sampling = Sampling(max_tokens=8, temperature=0)
    return [Request(at, [at % 7, at], sampling, tag=("tag", at)) for at in range(count)]


def answers_alone(count: int) -> dict[int, Any]:
    return {one.key: one.tokens for one in CountingEngine().run(rows(count))}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 400])
def test_every_row_is_answered_once_with_its_own_tag(count: int, workers: int) -> None:
    found = list(cluster(lambda number: LocalWorker(CountingEngine(width=1)), workers).run(rows(count)))
    assert {one.key: one.tokens for one in found} == answers_alone(count)
    assert len(found) == count
    assert all(one.tag == ("tag", one.key) for one in found)


def test_statistics_are_sums_and_the_same_object_throughout() -> None:
    engine = cluster(lambda number: LocalWorker(CountingEngine()))
    run = engine.run(rows(200))
    first = next(run)
    statistics = engine.statistics
    found = [first, *run]
    assert engine.statistics is statistics
    assert statistics.output_tokens == sum(one.usage.completion_tokens for one in found)
    assert statistics.computed_prompt_tokens == 400


def test_two_runs_in_a_row() -> None:
    engine = cluster(lambda number: LocalWorker(CountingEngine()))
    for _ in range(2):
        assert {one.key: one.tokens for one in engine.run(rows(50))} == answers_alone(50)


@pytest.mark.parametrize("lives", [0, 1, 3])
def test_rows_of_dead_workers_are_done_again(lives: int) -> None:
    hired: list[int] = []

    def hire(number: int) -> LocalWorker:
        hired.append(number)
        return LocalWorker(CountingEngine(seconds=0.001), lives if hired.count(number) == 1 else float("inf"))

    found = list(cluster(hire).run(rows(400)))
    assert sorted(one.key for one in found) == list(range(400))
    assert {one.key: one.tokens for one in found} == answers_alone(400)
    assert sorted(hired) == [0, 0, 1, 1]


def test_workers_that_always_die_end_the_run() -> None:
    with pytest.raises(JobError, match="workers died 5 times, the last with: killed"):
        list(cluster(lambda number: LocalWorker(CountingEngine(), lives=1)).run(rows(400)))


def test_a_replacement_that_never_comes_holds_nobody_up() -> None:
    hired: list[int] = []

    def hire(number: int) -> LocalWorker:
        hired.append(number)
        return LocalWorker(CountingEngine(), lives=2 if number == 0 else float("inf"), never=hired.count(number) > 1)

    found = list(cluster(hire).run(rows(400)))
    assert sorted(one.key for one in found) == list(range(400))
    assert sorted(hired) == [0, 0, 1]


def test_a_replacement_that_dies_while_it_loads_is_one_more_loss() -> None:
    hired: list[int] = []

    def hire(number: int) -> LocalWorker:
        hired.append(number)
        return LocalWorker(
            CountingEngine(), lives=2 if hired.count(0) == 1 and number == 0 else float("inf"),
            dies_loading=number == 0 and hired.count(0) == 2,
        )  # fmt: skip

    found = list(cluster(hire).run(rows(400)))
    assert sorted(one.key for one in found) == list(range(400))
    assert sorted(hired) == [0, 0, 0, 1]


def test_a_worker_that_cannot_load_at_the_start_ends_the_run() -> None:
    with pytest.raises(JobError, match="no such library"):
        cluster(lambda number: LocalWorker(CountingEngine(), dies_loading=True))


def test_an_interrupt_does_not_wait_for_a_replacement() -> None:
    engine = cluster(lambda number: LocalWorker(CountingEngine(), lives=1), 1)
    engine._hire = lambda number: LocalWorker(CountingEngine(), never=True)
    run = engine.run(rows(400))
    threading.Timer(0.3, engine.interrupt).start()
    assert len(list(run)) < 400


def test_gauges_of_the_past_do_not_add_up() -> None:
    gauges = Statistics(output_tokens=5, kv_blocks_used=3, kv_blocks_total=9, running=2)
    assert past(gauges) == Statistics(output_tokens=5)


def test_an_error_of_an_engine_is_the_run_s() -> None:
    def explode(request: Request) -> None:
        if request.key == 77:
            raise RuntimeError("row 77")

    with pytest.raises(RuntimeError, match="row 77"):
        list(cluster(lambda number: LocalWorker(CountingEngine(explode))).run(rows(400)))


def test_a_worker_that_is_slow_gives_work_away() -> None:
    engines = [CountingEngine(width=1, seconds=seconds) for seconds in (0.02, 0.0)]
    found = list(cluster(lambda number: LocalWorker(engines[number])).run(rows(320)))
    assert len(found) == 320
    assert len(engines[1].asked) > 200


def test_interrupt_ends_all_workers_soon() -> None:
    engine = cluster(lambda number: LocalWorker(CountingEngine(seconds=0.01)))
    run = engine.run(rows(100_000))
    next(run)
    threading.Timer(0.1, engine.interrupt).start()
    began = len(list(run))
    assert began < 90_000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker-")]


def test_a_reader_that_leaves_ends_the_run() -> None:
    engine = cluster(lambda number: LocalWorker(CountingEngine(seconds=0.001)))
    run = engine.run(rows(100_000))
    next(run)
    run.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker-")]


def test_failed_rows_pass_through() -> None:
    error = RowError("null_value", "prompt", "column is null")
    requests = [replace(one, error=error, prompt=[]) if one.key % 3 == 0 else one for one in rows(30)]
    engine = CountingEngine()
    found = {one.key: one for one in cluster(lambda number: LocalWorker(engine), 1).run(requests)}
    assert len(found) == 30
    assert all((found[at].error == error) == (at % 3 == 0) for at in range(30))
    assert all(key % 3 for key in engine.asked)
    assert found[0].tag == ("tag", 0)
    assert found[0].usage == Usage()


def test_rows_are_taken_only_as_fast_as_they_are_needed() -> None:
    taken: list[int] = []

    def endless() -> Iterator[Request]:
        for request in rows(10**6):
            taken.append(request.key)
            yield request

    engine = cluster(lambda number: LocalWorker(CountingEngine(seconds=0.001)))
    run = engine.run(endless())
    next(run)
    time.sleep(0.2)
    run.close()
    assert len(taken) <= 2 * 65_536
