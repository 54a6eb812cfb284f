"""How long answers will get: per group of prompts, from those that have ended."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.forecast import ENOUGH, MAX_GROUPS, REMEMBERED, LengthForecast, is_certain, lifetimes
from batchgen.engine.grammar import Grammar
from batchgen.engine.request import Sampling

SAMPLING = Sampling(max_tokens=100)


def test_groups_with_short_and_long_answers_are_told_apart():
    forecast = LengthForecast()
    for _ in range(2 * ENOUGH):
        forecast.observe(10, SAMPLING, (1,))
        forecast.observe(90, SAMPLING, (2,))
    assert forecast.remaining(0, SAMPLING, (1,)).expected == pytest.approx(10)
    assert forecast.remaining(0, SAMPLING, (2,)).expected == pytest.approx(90)
    assert forecast.remaining(0, SAMPLING, (2,)).variance == pytest.approx(0)
    unknown = forecast.remaining(0, SAMPLING, (3,))
    assert 45 <= unknown.expected <= 55
    assert unknown.variance > 1000


def test_answers_that_outlive_their_group_are_judged_by_all():
    forecast = LengthForecast()
    for _ in range(2 * ENOUGH):
        forecast.observe(10, SAMPLING, (1,))
        forecast.observe(90, SAMPLING, (2,))
    assert forecast.remaining(50, SAMPLING, (1,)).expected == pytest.approx(40)


@given(lengths=st.lists(st.integers(1, 100), min_size=ENOUGH, max_size=4 * ENOUGH), has=st.integers(0, 99))
def test_at_least_one_and_never_more_than_is_left(lengths, has):
    forecast = LengthForecast()
    for length in lengths:
        forecast.observe(length, SAMPLING, (1,))
    demand = forecast.remaining(has, SAMPLING, (1,))
    assert demand.expected >= 0.5
    assert demand.expected <= max(1.0, 100 - has)


def test_answers_that_run_count_for_what_they_have():
    """Of answers of 1 .. 100 tokens that began together, the first 20 to end are not what the others will be like."""
    lengths = [length for length in range(1, 101) for _ in range(5)]
    running = [(0.2, (1,)) for length in lengths if length > 20]
    forecast = LengthForecast(lambda: running)
    for length in lengths[:100]:
        forecast.observe(length, SAMPLING, (1,))
    for group in ((1,), (2,)):
        assert forecast.remaining(0, SAMPLING, group).expected == pytest.approx(50, abs=4)
    blind = LengthForecast()
    for length in lengths[:100]:
        blind.observe(length, SAMPLING, (1,))
    assert blind.remaining(0, SAMPLING, (1,)).expected < 12


def test_running_answers_of_other_groups_are_left_out():
    forecast = LengthForecast(lambda: [(0.5, (2,))] * 500)
    for _ in range(ENOUGH):
        forecast.observe(10, SAMPLING, (1,))
    assert forecast.remaining(0, SAMPLING, (1,)).expected == pytest.approx(10)
    assert forecast.remaining(0, SAMPLING, (2,)).expected > 60


def test_ended_answers_alone_are_a_fair_sample_once_they_are_many():
    forecast = LengthForecast(lambda: [(0.5, (1,))] * 500)
    for _ in range(REMEMBERED):
        forecast.observe(10, SAMPLING, (1,))
    assert forecast.remaining(0, SAMPLING, (1,)).expected == pytest.approx(10)


SORTED_SHARES = st.lists(st.floats(0.01, 1), max_size=50).map(sorted).map(np.array)


@given(ended=SORTED_SHARES.filter(len), running=SORTED_SHARES)
def test_lifetimes_are_a_distribution_and_without_running_ones_the_plain_one(ended, running):
    shares, weights = lifetimes(ended, running)
    assert weights.sum() == pytest.approx(1)
    assert weights.min() >= 0
    assert shares.max() <= 1
    _, plain = lifetimes(ended, np.array([]))
    assert plain[:-1] == pytest.approx(1 / len(ended))
    assert plain[-1] == pytest.approx(0)


def test_groups_are_bounded():
    forecast = LengthForecast()
    for name in range(10 * MAX_GROUPS):
        forecast.observe(5, SAMPLING, (name,))
    assert len(forecast._groups) == MAX_GROUPS


def test_a_grammar_may_end_an_answer_before_min_tokens():
    assert is_certain(Sampling(max_tokens=9, min_tokens=9))
    assert is_certain(Sampling(max_tokens=9, ignore_eos=True))
    assert not is_certain(Sampling(max_tokens=9, min_tokens=9, ignore_eos=True, grammar=Grammar.regex("yes|no")))
