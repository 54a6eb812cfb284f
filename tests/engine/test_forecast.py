"""How long answers will get: per group of prompts, from those that have ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.forecast import ENOUGH, MAX_GROUPS, LengthForecast, is_certain
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


def test_groups_are_bounded():
    forecast = LengthForecast()
    for name in range(10 * MAX_GROUPS):
        forecast.observe(5, SAMPLING, (name,))
    assert len(forecast._groups) == MAX_GROUPS


def test_a_grammar_may_end_an_answer_before_min_tokens():
    assert is_certain(Sampling(max_tokens=9, min_tokens=9))
    assert is_certain(Sampling(max_tokens=9, ignore_eos=True))
    assert not is_certain(Sampling(max_tokens=9, min_tokens=9, ignore_eos=True, grammar=Grammar.regex("yes|no")))
