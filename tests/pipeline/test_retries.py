"""Rows asked again: as often as allowed, with new noise each time, and the same whatever happens around them."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.request import MAX_SEED, Completion, Request, RowError, Sample, Sampling
from batchgen.pipeline.retries import Retrying


@dataclass
class Dice:
    """An engine whose answer to a row is one number drawn from its seed; hands out in another order than it takes."""

    order: random.Random = field(default_factory=lambda: random.Random(0))
    seeds: dict[int, list[int]] = field(default_factory=dict)
    interrupted: bool = False

    def interrupt(self) -> None:
        self.interrupted = True

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        held: list[Completion] = []
        for request in requests:
            seed = request.sampling.seed
            self.seeds.setdefault(request.key, []).append(seed)
            drawn = random.Random(f"{seed} {request.key}").randrange(10)
            error = RowError("engine", "generate", "x") if drawn == 9 else None
            samples = () if error else (Sample([drawn], "stop" if drawn < 5 else "length"),)
            held.append(Completion(request.key, samples, error=error, tag=request.tag))
            while len(held) > 3 or (held and self.order.random() < 0.5):
                yield held.pop(self.order.randrange(len(held)))
        yield from held


def rows(count: int, **values) -> list[Request]:
    return [Request(key, [1], Sampling(**values), tag=object()) for key in range(count)]


def ask(wanted: list[Request], retries: int, seed: int = 0) -> tuple[dict[int, Completion], Dice]:
    dice = Dice(random.Random(seed))
    engine = Retrying(dice, retries, lambda completion: completion.samples[0].finish_reason == "stop")
    found = list(engine.run(iter(wanted)))
    assert sorted(completion.key for completion in found) == [request.key for request in wanted]
    return {completion.key: completion for completion in found}, dice


@given(st.integers(0, 4), st.integers(0, 100), st.integers(0, 40))
def test_every_row_comes_once_and_as_if_alone(retries, order, count):
    wanted = rows(count, seed=5)
    found, dice = ask(wanted, retries, order)
    for request in wanted:
        one = found[request.key]
        assert one.tag is request.tag
        assert one.attempts == len(dice.seeds[request.key]) <= retries + 1
        assert one.error is not None or one.finish_reason == "stop" or one.attempts == retries + 1
        (alone,) = ask([request], retries)[0].values()
        assert (alone.samples, alone.error, alone.attempts) == (one.samples, one.error, one.attempts)
        assert len(set(dice.seeds[request.key])) == one.attempts
        assert dice.seeds[request.key][0] == 5
        assert all(0 <= seed <= MAX_SEED for seed in dice.seeds[request.key])


def test_more_attempts_make_more_whole_answers():
    whole = [sum(one.finish_reason == "stop" for one in ask(rows(200), retries)[0].values()) for retries in (0, 1, 5)]
    assert whole[0] < whole[1] < whole[2]


def test_greedy_rows_are_asked_once():
    found, dice = ask(rows(50, temperature=0), 3)
    assert {len(seeds) for seeds in dice.seeds.values()} == {1}
    assert {one.attempts for one in found.values()} == {1}


def test_interrupting_reaches_the_engine():
    dice = Dice()
    Retrying(dice, 1, lambda completion: True).interrupt()
    assert dice.interrupted


def test_an_error_of_the_engine_goes_through():
    class Broken(Dice):
        def run(self, requests):
            raise RuntimeError("no")
            yield

    with pytest.raises(RuntimeError, match="no"):
        list(Retrying(Broken(), 2, lambda completion: True).run(rows(1)))
