"""Cutting the plan order: every row once, equal costs, little shared across a cut, nobody idle while others work."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.plan import common_prefix, plan
from batchgen.engine.request import Request, Sampling
from batchgen.jobs.cluster import pieces as module
from batchgen.jobs.cluster.pieces import Piece, Pieces, cut

prompts_strategy = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40)


def requests_of(prompts: Sequence[Sequence[int]], max_tokens: int = 2) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens)
    return [Request(at, list(prompts[index]), sampling) for at, index in enumerate(plan(prompts).order)]


def keys(found: Sequence[Piece]) -> list[int]:
    return [request.key for piece in found for request in piece.requests]


@given(prompts_strategy, st.integers(1, 9))
def test_pieces_are_the_rows_in_their_order(prompts: list[list[int]], count: int) -> None:
    found = cut(requests_of(prompts), count)
    assert keys(found) == list(range(len(prompts)))
    assert len(found) <= count
    assert all(piece.requests for piece in found)


@given(prompts_strategy, st.integers(1, 9))
def test_costs_are_those_of_the_whole(prompts: list[list[int]], count: int) -> None:
    distinct = plan(prompts).distinct_tokens
    assert sum(piece.cost for piece in cut(requests_of(prompts), count)) == pytest.approx(distinct + len(prompts))


def test_a_cut_goes_between_groups() -> None:
    groups = [[group] * 50 + [at] for group in range(8) for at in range(9)]
    found = cut(requests_of(groups), 4)
    assert [len(piece.requests) for piece in found] == [18, 18, 18, 18]


def test_pieces_cost_about_the_same() -> None:
    lonely = [[at, 1, 2, 3] for at in range(1000)]
    costs = [piece.cost for piece in cut(requests_of(lonely), 16)]
    assert max(costs) <= 1.5 * min(costs)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_length(first: list[int], second: list[int]) -> None:
    length = common_prefix(np.array(first, np.uint32), np.array(second, np.uint32))
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


@given(prompts_strategy, st.integers(1, 4), st.data())
def test_every_row_is_handed_out_once_whoever_asks(prompts: list[list[int]], workers: int, data: st.DataObject) -> None:
    supply, seen = Pieces(requests_of(prompts), workers), []
    while (piece := supply.take(data.draw(st.integers(0, workers - 1)))) is not None:
        seen += keys([piece])
    assert sorted(seen) == list(range(len(prompts)))
    assert all(supply.take(worker) is None for worker in range(workers))


@given(prompts_strategy, st.integers(1, 3))
def test_a_long_stream_comes_in_batches(prompts: list[list[int]], rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_ROWS", rows)
        supply, seen = Pieces(iter(requests_of(prompts)), 2), []
        while (piece := supply.take(len(seen) % 2)) is not None:
            seen += keys([piece])
    assert sorted(seen) == list(range(len(prompts)))


def test_workers_that_keep_pace_keep_their_intervals() -> None:
    supply = Pieces(requests_of([[at] for at in range(160)]), 2)
    first, second = [], []
    for _ in range(8):
        first += keys([supply.take(0) or Piece((), 0)])
        second += keys([supply.take(1) or Piece((), 0)])
    assert first == list(range(80))
    assert second == list(range(80, 160))


def test_a_worker_that_runs_dry_takes_the_later_half_of_the_largest_interval() -> None:
    supply = Pieces(requests_of([[at] for at in range(160)]), 2)
    for _ in range(8):
        supply.take(0)
    stolen = keys([supply.take(0) or Piece((), 0)])
    assert stolen == list(range(120, 130))
    assert keys([supply.take(1) or Piece((), 0)]) == list(range(80, 90))


def test_rows_of_a_dead_worker_come_first() -> None:
    supply = Pieces(requests_of([[at] for at in range(40)]), 2)
    lost = supply.take(0)
    assert lost is not None
    supply.give_back(lost.requests)
    assert keys([supply.take(1) or Piece((), 0)]) == keys([lost])


def test_reuse_is_lost_only_at_cuts() -> None:
    """Distinct tokens of all pieces together: those of the whole and one common prefix for each cut."""
    prompts = [[group, *range(group, group + 30), at] for group in range(6) for at in range(20)]
    requests = requests_of(prompts)
    found = cut(requests, 16)
    apart = sum(plan([request.prompt for request in piece.requests]).distinct_tokens for piece in found)
    assert apart <= plan(prompts).distinct_tokens + (len(found) - 1) * max(map(len, prompts))
