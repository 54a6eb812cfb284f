"""The figures and the advice of `batchgen plan`, against countings done the slow way."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_models import FakeModels
from hypothesis import given, settings
from hypothesis import strategies as st
from job_files import make_job, write_rows

from batchgen.engine.plan import plan
from batchgen.engine.request import Sampling
from batchgen.jobs.advice import advise, template_parts
from batchgen.jobs.analysis import PromptStatistics
from batchgen.jobs.command_plan import Planner, duration, excerpt, parameters
from batchgen.pipeline.config import PromptSettings
from batchgen.pipeline.windows import WindowBudget


def statistics_of(prompts: list[list[int]], limit: int = 1000) -> PromptStatistics:
    statistics = PromptStatistics()
    planned = plan(prompts)
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.array([token for prompt in prompts for token in prompt], np.uint32)
    statistics.add(tokens, starts[planned.order], lengths[planned.order], planned.common, limit)
    return statistics


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=20))
def test_counts(prompts: list[list[int]]) -> None:
    found = statistics_of(prompts, limit=10)
    nodes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert found.distinct_tokens == len(nodes)
    assert found.tokens == sum(map(len, prompts))
    assert found.duplicates == len(prompts) - len({tuple(prompt) for prompt in prompts})
    assert found.near_limit == sum(len(prompt) > 10 for prompt in prompts)
    assert found.histogram.sum() == found.rows == len(prompts)
    prefixes = Counter(tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1))
    for group in found.groups:
        assert prefixes[group.prefix] == group.rows > 1
        assert len(group.prefix) >= 8
        longer = [
            other for other in prefixes if other[: len(group.prefix)] == group.prefix and len(other) > len(group.prefix)
        ]
        assert all(prefixes[other] < group.rows for other in longer)


def test_the_largest_groups_come_first_and_nested_ones_count_only_their_own() -> None:
    system, first, second = list(range(100)), list(range(200, 230)), list(range(300, 310))
    prompts = [system + first + [1000 + at] for at in range(10)] + [system + second + [2000 + at] for at in range(20)]
    groups = statistics_of(prompts).groups
    assert [(group.rows, len(group.prefix), group.saved) for group in groups] == [
        (30, 100, 100 * 29), (10, 130, 30 * 9), (20, 110, 10 * 19),
    ]  # fmt: skip
    assert (
        sum(group.saved for group in groups) == statistics_of(prompts).tokens - statistics_of(prompts).distinct_tokens
    )


def test_windows_are_added_up(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    planner = Planner(make_job(tmp_path), FakeModels())
    planner.read(WindowBudget(rows=10))
    whole = Planner(make_job(tmp_path), FakeModels())
    whole.read()
    assert (planner.statistics.tokens, planner.statistics.rows) == (whole.statistics.tokens, whole.statistics.rows)
    assert planner.statistics.windows > 1
    assert planner.statistics.distinct_tokens > whole.statistics.distinct_tokens
    assert planner.errors == whole.errors == {"null_value": 4}
    assert planner.answer_tokens == 36 * 12


def advice(prompt: dict[str, Any], distinct: dict[str, float] | None = None, **figures: Any) -> list[str]:
    statistics = PromptStatistics(rows=10, tokens=1000, distinct_tokens=900)
    for name, value in figures.items():
        setattr(statistics, name, value)
    return list(advise(PromptSettings.model_validate(prompt), statistics, distinct or {}))


def test_late_instructions_are_pointed_out() -> None:
    long = "Answer with one word out of this list and nothing else at all."
    assert "put the instructions first" in advice({"text": "{{ doc }}\n" + long})[0]
    assert advice({"text": long + "\n{{ doc }}"}) == []
    chat = [{"role": "user", "content": "{{ doc }}"}, {"role": "user", "content": long}]
    assert "fixed text stand after {{ doc }}" in advice({"messages": chat})[0]
    assert advice({"text": "{{ doc }}\n" + long}, distinct_tokens=100) == []


def test_a_column_that_never_repeats_in_front_of_one_that_does() -> None:
    shares = {"id": 1.0, "topic": 0.01}
    assert "'id' differs in nearly every row" in advice({"text": "{{ id }} {{ topic }}"}, shares)[0]
    assert advice({"text": "{{ topic }} {{ id }}"}, shares) == []


def test_duplicates_and_the_limit() -> None:
    lines = advice({"text": "{{ x }}"}, duplicates=3, near_limit=2)
    assert lines[0].startswith("3 prompts equal another one")
    assert lines[1].startswith("2 prompts come within a tenth")


def test_parts_of_a_template() -> None:
    text = "a {% for item in rows %}{{ item }}{{ word|upper }}{% endfor %} b"
    parts = template_parts(PromptSettings(text=text))
    assert [name or text for name, text in parts] == ["a ", "rows", "word", " b"]


@pytest.mark.parametrize(("seconds", "words"), [(3, "about 3 s"), (600, "about 10 min"), (36000, "about 10.0 h")])
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_an_excerpt_is_one_line() -> None:
    assert excerpt("a\nb") == '"a\\nb"'
    assert len(excerpt("x" * 10_000)) < 200


def test_the_demo_model_has_135_million_weights() -> None:
    from batchgen.engine.spec import ModelSpec, RopeSpec

    rope = RopeSpec("default", 1e5, 64, 8192)
    spec = ModelSpec("llama", 49152, 8192, 576, 1536, 30, 9, 3, 64, 1e-5, rope, (None,) * 30, tied=True)
    assert parameters(spec) == pytest.approx(135e6, rel=0.01)
    assert Sampling().max_tokens == 256
