"""The policy of `auto` on a machine made of a formula: on where drafts pay, off where not, never much slower."""

import random
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.draft.controller import PLAIN_EVERY, Acceptance, Controller, decodes_only
from batchgen.engine.draft.speculation import Draft
from batchgen.engine.draft.times import RIDGE, StepTimes

GUESS = Draft((1, 2, 3, 4, 5, 6), (0.7,) * 6, 6, "own text")


def step_of(counts, tries_drafts=False):
    feeds = [SimpleNamespace(samples=True, count=count, draft=(0,) * (count - 1)) for count in counts]
    return SimpleNamespace(feeds=feeds, num_tokens=sum(counts), tries_drafts=tries_drafts)


def simulate(seconds, accept, sequences, steps=1500, noise=0.0, seed=0):
    """Tokens per second relative to no drafts, and drafted tokens per step in the last third."""
    controller, chance = Controller(), random.Random(seed)
    tokens = spent = plain = late = 0.0
    for number in range(steps):
        size = sequences(number)
        lengths = [0] * size
        opened = controller.opens(step_of([1] * size))
        if opened:
            lengths = controller.lengths([GUESS] * size, step_of([1] * size))
        step = step_of([1 + length for length in lengths], opened)
        took = seconds(step.num_tokens) * (1 + noise * chance.random())
        controller.timed(step, took)
        spent += took
        for length in lengths:
            right = next((place for place in range(length) if chance.random() > accept), length)
            controller.verified(GUESS.cut(length), right)
            tokens += 1 + right
            plain += (1 + right) * seconds(size) * (1 + noise / 2) / size
        late += sum(lengths) if number > 2 * steps // 3 else 0
    return plain / spent, late / (steps / 3)


def flat_to_ridge(num_tokens: int) -> float:
    return 0.02 * max(1.0, num_tokens / 12)


def linear(num_tokens: int) -> float:
    return 0.002 + 0.001 * num_tokens


@pytest.mark.parametrize("accept", [0.3, 0.7, 0.95])
def test_below_the_ridge_drafts_are_nearly_free_and_taken(accept):
    gain, late = simulate(flat_to_ridge, accept, lambda number: 3)
    assert late > 1
    assert gain > 1 + accept / 3


@pytest.mark.parametrize("accept", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_past_the_ridge_poor_drafts_cost_next_to_nothing(accept, noise):
    gain, late = simulate(linear, accept, lambda number: 64, steps=600, noise=noise)
    assert gain > 0.97
    assert late < 2


def test_past_the_supposed_ridge_larger_steps_are_tried_and_kept_when_they_are_cheap():
    gain, late = simulate(lambda num_tokens: 0.02 + 0.0002 * num_tokens, 0.8, lambda number: 16)
    assert late > 10
    assert gain > 1.3


def test_it_wakes_in_the_drain():
    """64 sequences for 600 steps, then fewer and fewer."""
    gain, late = simulate(flat_to_ridge, 0.8, lambda number: 64 if number < 600 else 4, steps=1500)
    assert late > 4
    assert gain > 1.1


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_a_step_without_drafts_takes_is_measured_whatever_was_planned_since(ahead):
    """The scheduler plans a step, and so asks the policy, before it hears how long the one under way took."""
    controller, under_way, plain = Controller(), deque(), []
    controller._plain.measure = lambda size, seconds: (
        plain.append(seconds),
        StepTimes.measure(controller._plain, size, seconds),
    )
    for _ in range(10 * PLAIN_EVERY):
        opened = controller.opens(step_of([1] * 4))
        length = min(controller.lengths([GUESS] * 4, step_of([1] * 4))) if opened else 0
        under_way.append((step_of([1 + length] * 4, opened), length))
        if len(under_way) > ahead:
            step, fed = under_way.popleft()
            controller.timed(step, 0.03 if step.tries_drafts else 0.02)
            for _ in range(4):
                controller.verified(GUESS.cut(fed), fed)
    assert len(plain) >= 10
    assert set(plain) == {0.02}


def test_steps_that_compute_prompts_are_left_alone():
    controller = Controller()
    step = step_of([1, 1])
    step.feeds.append(SimpleNamespace(samples=False, count=200, draft=()))
    assert not decodes_only(step)
    assert not any(controller.opens(step) for _ in range(PLAIN_EVERY * 2))


@settings(max_examples=100, deadline=None)
@given(measured=st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1.0), min_size=1, max_size=12))
def test_step_times_are_what_was_measured_and_between(measured):
    times = StepTimes()
    exact = {size: value for size, value in measured.items() if size <= 16}
    for size, value in measured.items():
        times.measure(size, value)
    for size, value in exact.items():
        assert times.seconds(size) == pytest.approx(value)
    low, high = min(measured.values()), max(measured.values())
    for size in range(min(measured), max(measured)):
        assert 0 < times.seconds(size) <= high * max(1, size / RIDGE) + 1e-9
    assert times.seconds(10 * max(measured)) >= times.seconds(max(measured)) - 1e-12
    assert low > 0


def test_acceptance_is_learned_by_bucket():
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.observe(GUESS, 1)
    long_match = Draft(GUESS.tokens, GUESS.chances, 60, GUESS.source)
    assert acceptance.paths(GUESS)[0] == pytest.approx(0.5, abs=0.05)  # one token right, one wrong each time
    assert acceptance.paths(long_match)[0] == pytest.approx(0.7)
    assert acceptance.paths(GUESS) == sorted(acceptance.paths(GUESS), reverse=True)
