"""Windows: requests out are requests in, ordered to share, prepared in a thread, kept on disk and removed."""

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.plan import plan
from batchgen.engine.request import Request, RowError, Sampling
from batchgen.pipeline.background import Ahead
from batchgen.pipeline.rows import RowTag
from batchgen.pipeline.runs import RunSizes
from batchgen.pipeline.store import WindowWriter
from batchgen.pipeline.windows import Pace, WindowBudget, plan_windows, planners

FAILED = RowError("template", "prompt", "no \u00e9 \ud800", retryable=False)


def request(key: int, *prompt: int, **sampling: Any) -> Request:
    chosen = Sampling(**sampling)
    return Request(key, list(prompt), chosen, RowTag(key, chosen))


def failed(key: int) -> Request:
    return Request(key, (), Sampling(), RowTag(key, Sampling()), FAILED)


def windows_of(requests: list[Request], directory: Path | None = None, **budget: Any) -> list[list[Request]]:
    return [list(window) for window in plan_windows(requests, directory, WindowBudget(**budget))]


def window_asks(pace: Pace) -> dict[Sampling, int]:
    """Kinds of request that are handed out would otherwise slow down every later look at the rest."""
    assert pace._current is not None
    return pace._current[1].asks


def test_the_rest_is_known_once_the_last_window_is_handed_out() -> None:
    requests = [request(key, key % 7, key, max_tokens=4 + 4 * (key % 2), seed=key) for key in range(20)]
    pace, rests = Pace(), []
    for window in plan_windows(requests, None, WindowBudget(rows=10), pace=pace):
        for _ in window:
            time.sleep(0.002)
            rests.append(pace.rest())
    known = [{ask.max_tokens: count for ask, count in rest.items()} for rest in rests if rest is not None]
    assert rests[0] is None
    assert sum(known[0].values()) >= 9 - 3  # the end is known once the reader has come to it, a moment after
    assert known[-1] == {}
    assert not window_asks(pace)
    assert all(sum(one.values()) - sum(two.values()) == 1 for one, two in pairwise(known))


def test_longer_answers_come_first_in_a_branch_of_a_window() -> None:
    requests = [request(key, key // 4, 9, key, max_tokens=10 + (key * 5) % 8) for key in range(12)]
    (window,) = windows_of(requests)
    lengths = [one.sampling.max_tokens for one in window]
    branches = [[one.prompt[0] for one in window][at : at + 4] for at in (0, 4, 8)]
    assert all(len(set(branch)) == 1 for branch in branches)  # what shares stays together
    assert all(lengths[at : at + 4] == sorted(lengths[at : at + 4], reverse=True) for at in (0, 4, 8))
    assert lengths[0] == max(lengths)


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.sampled_from([4, 8]), st.booleans()), max_size=20
)


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 20), st.integers(1, 60), st.integers(1, 6))
def test_every_request_comes_out_once_and_unchanged(
    drawn: list[tuple[list[int], int, bool]], rows: int, tokens: int, chunk: int
) -> None:
    requests = [
        failed(key) if bad else request(key, *prompt, max_tokens=limit)
        for key, (prompt, limit, bad) in enumerate(drawn)
    ]
    windows = windows_of(requests, rows=rows, tokens=tokens, sizes=RunSizes(rows=chunk, block=3))
    assert all(0 < len(window) <= rows for window in windows)
    out = sorted((one for window in windows for one in window), key=lambda one: one.key)
    assert [(one.key, list(one.prompt), one.tag.position, one.error) for one in out] == [
        (one.key, list(one.prompt), one.key, one.error) for one in requests
    ]
    for before, after in zip(requests, out, strict=True):
        assert before.error is not None or before.sampling == after.sampling == after.tag.sampling


def test_one_window_orders_by_prefix_and_puts_duplicates_side_by_side() -> None:
    requests = [request(0, 7, 8), request(1, 1, 2), failed(2), request(3, 7, 8), request(4, 7)]
    [window] = windows_of(requests)
    assert [one.key for one in window] == [2, 1, 4, 0, 3]


def test_closing_the_windows_ends_the_one_that_is_read() -> None:
    """Not the garbage collector, in another run's time: files are removed there."""
    windows = plan_windows([request(key, 1, 2) for key in range(9)], None, WindowBudget())
    window = next(windows)
    assert next(window).key == 0
    windows.close()
    assert list(window) == []


def test_budgets_cut_windows() -> None:
    requests = [request(key, 1, 2, 3) for key in range(10)]
    assert [len(window) for window in windows_of(requests, rows=4)] == [4, 4, 2]
    assert [len(window) for window in windows_of(requests, tokens=6)] == [2] * 5
    assert windows_of([]) == []


def test_a_window_that_the_disk_has_no_room_for_ends_where_it_would_need_it(tmp_path: Path) -> None:
    """Its first rows need no disk, so a full one makes windows small and ends no run."""
    sizes = RunSizes(rows=4, tokens=1000)
    requests = [request(key, 1, 2) for key in range(20)]
    assert [len(window) for window in windows_of(requests, tmp_path, disk=0, sizes=sizes)] == [4] * 5
    row_bytes = 2 * 4 + 24
    assert [len(window) for window in windows_of(requests, tmp_path, disk=8 * row_bytes, sizes=sizes)] == [12, 8]


def test_windows_grow_for_an_engine_that_is_faster_than_reading() -> None:
    """The first one is out at once; each later one waits for four times as much, so there are few."""
    sizes = [len(window) for window in windows_of([request(key, 1, 2) for key in range(20_000)], patience=-1.0)]
    assert sizes[0] == 1
    assert all(4 * before <= after for before, after in pairwise(sizes[:-1]))
    assert sum(sizes) == 20_000


def test_an_engine_that_is_slower_than_reading_loses_no_sharing() -> None:
    """While the first window runs, the second takes in all there is."""
    random = Random(1)
    prompts = [[random.randrange(50)] * 30 + [random.randrange(5000) for _ in range(10)] for _ in range(20_000)]
    read = threading.Event()

    def source() -> Iterator[Request]:
        for key, prompt in enumerate(prompts):
            yield request(key, *prompt)
        read.set()

    orders = []
    for window in plan_windows(source(), None, WindowBudget(patience=0.05)):
        orders.append([next(window)])
        assert read.wait(20)
        orders[-1].extend(window)
    assert len(orders) == 2
    together = plan([list(one.prompt) for order in orders for one in order])
    apart = sum(plan([list(one.prompt) for one in order]).distinct_tokens for order in orders)
    assert apart <= 1.02 * together.distinct_tokens


def test_files_are_there_only_as_long_as_they_are_needed(tmp_path: Path) -> None:
    small = WindowBudget(rows=3, sizes=RunSizes(rows=1))
    windows = plan_windows([request(key, 1, 2) for key in range(9)], tmp_path, small)
    first = next(windows)
    assert len(list(tmp_path.rglob("*.tokens"))) >= 3
    list(first)
    windows.close()
    assert list(tmp_path.iterdir()) == []
    assert [len(list(window)) for window in plan_windows([request(0, 1)], tmp_path, WindowBudget())] == [1]
    assert list(tmp_path.iterdir()) == []


def test_the_next_window_is_made_while_this_one_runs_and_no_further() -> None:
    made: list[int] = []

    def source() -> Iterator[Request]:
        for key in range(100):
            made.append(key)
            yield request(key, 1)

    windows = plan_windows(source(), None, WindowBudget(rows=10))
    window = next(windows)
    next(window)
    for _ in range(500):
        if len(made) >= 20:
            break
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    assert len(made) == 20
    windows.close()
    assert len(made) == 20


def test_errors_of_the_thread_are_raised_where_windows_are_taken(tmp_path: Path) -> None:
    def source() -> Iterator[Request]:
        yield request(0, 1)
        yield request(1, 1)
        raise OSError("disk gone")

    windows = plan_windows(source(), tmp_path, WindowBudget(rows=1))
    taken: list[int] = []
    with pytest.raises(OSError, match="disk gone"):
        taken.extend(one.key for window in windows for one in window)
    assert taken == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_stop_ends_reading_between_two_requests() -> None:
    stop = threading.Event()

    def endless() -> Iterator[Request]:
        key = 0
        while True:
            yield request(key, 1)
            key += 1
            if key == 1000:
                stop.set()

    assert list(plan_windows(endless(), None, WindowBudget(), stop)) == []


def test_ahead_hands_out_batches_without_waiting_for_more() -> None:
    go_on = threading.Event()

    def source() -> Iterator[int]:
        yield from range(5)
        go_on.wait(10)
        yield 5

    with Ahead(source(), 100) as items:
        batches = items.batches(3, 0.05)
        assert [item for _ in range(10) for item in next(batches)] == [0, 1, 2, 3, 4]
        assert next(batches) == []
        go_on.set()
        assert [batch for batch in batches if batch] == [[5]]


def test_ahead_bounds_what_waits_by_weight() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield 10

    with Ahead(source(), 35, weight=lambda item: item) as items:
        batches = items.batches(20, 5)
        assert next(batches) == [10, 10]
        threading.Event().wait(0.05)
        assert 4 <= len(made) <= 6
        assert sum(map(len, batches)) == 98


def test_ahead_is_bounded_and_closes_its_source() -> None:
    made: list[int] = []
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            for number in range(1000):
                made.append(number)
                yield number
        finally:
            closed.set()

    with Ahead(source(), 5) as items:
        assert next(iter(items)) == 0
        threading.Event().wait(0.05)
        assert len(made) <= 7
    assert closed.is_set()


def test_a_seed_for_each_row_keeps_one_sampling_in_memory(tmp_path: Path) -> None:
    with planners() as pool:
        writer = WindowWriter(tmp_path, "0", pool, RunSizes(rows=300))
        for key in range(1000):
            writer.add(request(key, 1, 2, seed=key * 2**50, temperature=0.5 + key % 2))
        window = writer.finish()
        assert len(window.samplings) == 2
        requests = list(window.requests())
    assert sorted(one.key for one in requests) == list(range(1000))
    for one in requests:
        assert one.sampling == one.tag.sampling == Sampling(seed=one.key * 2**50, temperature=0.5 + one.key % 2)
