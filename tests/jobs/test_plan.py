"""The figures and the advice of `batchgen plan`, against countings done the slow way."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_models import FakeModels
from hypothesis import given, settings
from hypothesis import strategies as st
from job_files import make_job, write_rows

from batchgen.engine.plan import plan
from batchgen.engine.spec import ModelSpec, RopeSpec
from batchgen.jobs.advice import advise
from batchgen.jobs.analysis import PromptStatistics
from batchgen.jobs.command_plan import excerpt, plan_job
from batchgen.jobs.estimate import duration, machine_rate
from batchgen.jobs.planner import Planner
from batchgen.pipeline.runs import RunSizes, plan_rows
from batchgen.pipeline.token_rows import ROW, TokenRows

ROPE = RopeSpec("default", 1e5, 64, 8192)
SPEC = ModelSpec("llama", 49152, 8192, 576, 1536, 30, 9, 3, 64, 1e-5, ROPE, (None,) * 30, tied=True)


def statistics_of(prompts: list[list[int]], limit: int = 1000, size: int = 1000) -> PromptStatistics:
    """Counted in parts of `size` rows."""
    statistics = PromptStatistics(limit)
    order = plan(prompts).order
    before = np.zeros(0, np.uint32)
    for start in range(0, len(order), size):
        part = plan_rows(rows_of([prompts[index] for index in order[start : start + size]])).joined(before)
        statistics.add(part)
        before = part.last_prompt
    statistics.close()
    return statistics


def rows_of(prompts: list[list[int]]) -> TokenRows:
    rows = np.zeros(len(prompts), ROW)
    rows["length"] = [len(prompt) for prompt in prompts]
    return TokenRows(np.array([token for prompt in prompts for token in prompt], np.uint32), rows)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=20)


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 7))
def test_parts_make_no_difference(prompts: list[list[int]], size: int) -> None:
    """The groups are the same, but for which of those that save as much are kept."""
    whole, parts = statistics_of(prompts), statistics_of(prompts, size=size)
    assert [(group.saved, group.rows) for group in parts.groups] == [
        (group.saved, group.rows) for group in whole.groups
    ]
    assert parts.distinct_tokens == whole.distinct_tokens


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 20))
def test_counts(prompts: list[list[int]], size: int) -> None:
    found = statistics_of(prompts, limit=10, size=size)
    nodes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert found.distinct_tokens == len(nodes)
    assert found.tokens == sum(map(len, prompts))
    assert found.duplicates == len(prompts) - len({tuple(prompt) for prompt in prompts})
    repeated = Counter(tuple(prompt) for prompt in prompts)
    assert found.duplicate_tokens == sum(len(prompt) * (count - 1) for prompt, count in repeated.items())
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


def test_a_plan_out_of_core_counts_the_same(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    planner, whole = (Planner(make_job(tmp_path), FakeModels()) for _ in range(2))
    planner.read(RunSizes(rows=7, tokens=200, block=20))
    whole.read()
    assert planner.statistics.tokens == whole.statistics.tokens
    assert planner.statistics.distinct_tokens == whole.statistics.distinct_tokens
    assert planner.statistics.groups[:1] == whole.statistics.groups[:1]
    assert planner.errors == whole.errors == {"null_value": 4}
    assert planner.answer_tokens == 36 * 12


LONG = "Answer with one word out of this list and nothing else at all."


def planned(tmp_path: Path, prompt: dict[str, Any], columns: dict[str, list[Any]] | None = None) -> Any:
    """What `plan --json` tells about 60 rows: an id of each, and a topic that repeats."""
    topics = [f"a topic of several words, number {row % 3}" for row in range(60)]
    table = pa.table(columns or {"id": [f"{row:04}" for row in range(60)], "topic": topics})
    pq.write_table(table, tmp_path / "rows.parquet")
    [line] = plan_job(make_job(tmp_path, prompt=prompt, input={"path": "rows.parquet"}), FakeModels(), as_json=True)
    return json.loads(line)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FakeModels, "spec", lambda self, job: SPEC, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_late_instructions_are_pointed_out_with_what_they_cost(tmp_path: Path) -> None:
    before = planned(tmp_path, {"text": "{{ id }}\n" + LONG})
    [advice] = before["advice"]
    assert "fixed text stand after {{ id }}" in advice["text"]
    assert advice["templates"] == {"prompt.text": f"{LONG}\n\n{{{{ id }}}}"}
    found = planned(tmp_path, {"text": LONG + "\n\n{{ id }}"})
    assert advice["saved_tokens"] == pytest.approx(
        before["distinct_prefix_tokens"] - found["distinct_prefix_tokens"], 0.02
    )
    assert planned(tmp_path, {"text": LONG + "\n{{ id }}"})["advice"] == []


def test_late_instructions_of_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "{{ id }}"}, {"role": "user", "content": LONG}]
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}", encoding="utf-8")
    planner = Planner(chat_job(tmp_path, chat), FakeModels())
    [found] = advise(planner.job.prompt, planner.source, planner.sample)
    assert "fixed text stand after {{ id }}" in found.text
    assert [message.content for message in found.prompt.messages or ()] == [f"{LONG}\n\n{{{{ id }}}}", ""]


def chat_job(tmp_path: Path, chat: list[dict[str, str]]) -> Any:
    pq.write_table(pa.table({"id": [f"{row:04}" for row in range(60)]}), tmp_path / "rows.parquet")
    model = {"path": "fake", "chat_template": "chat.jinja"}
    return make_job(tmp_path, prompt={"messages": chat}, input={"path": "rows.parquet"}, model=model)


def test_a_column_that_never_repeats_in_front_of_one_that_does(tmp_path: Path) -> None:
    [advice] = planned(tmp_path, {"text": "{{ id }} {{ topic }}"})["advice"]
    assert "{{ id }} stands before fields that repeat more" in advice["text"]
    assert advice["templates"] == {"prompt.text": "{{ topic }} {{ id }}"}
    assert planned(tmp_path, {"text": "{{ topic }} {{ id }}"})["advice"] == []


def test_blocks_that_reorder_would_move_are_named(tmp_path: Path) -> None:
    found = planned(tmp_path, {"text": "{{ id }}\n\n{{ topic }}"})
    assert any("prompt.reorder: true would write prompt.text as blocks 2 1" in one["text"] for one in found["advice"])
    assert found["prompt_order"] == {}
    ordered = planned(tmp_path, {"text": "{{ id }}\n\n{{ topic }}", "reorder": True})
    assert ordered["prompt_order"] == {"prompt.text": [1, 0]}
    assert ordered["advice"] == []
    saved = max(one["saved_tokens"] for one in found["advice"])
    assert found["distinct_prefix_tokens"] - ordered["distinct_prefix_tokens"] == pytest.approx(saved, rel=0.01)


def test_nothing_is_advised_about_parts_that_depend_on_each_other(tmp_path: Path) -> None:
    assert planned(tmp_path, {"text": "{% set x = id %}{{ x }} {{ topic }}\n" + LONG})["advice"] == []


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("ids", [[], [None, None, None]])
def test_a_plan_of_nothing(tmp_path: Path, ids: list[None], as_json: bool) -> None:
    pq.write_table(pa.table({"id": pa.array(ids, pa.string())}), tmp_path / "rows.parquet")
    job = make_job(tmp_path, prompt={"text": "{{ id }}"}, input={"path": "rows.parquet"})
    lines = list(plan_job(job, FakeModels(), as_json))
    if as_json:
        found = json.loads(lines[0])
        assert (found["rows"], found["prompt_tokens"], found["saved_share"]) == (len(ids), 0, 0.0)
        assert found["failing"] == ({"null_value": 3} if ids else {})
    else:
        assert lines[0].startswith(f"rows: {len(ids)}; {len(ids)} will fail")


def test_prompts_beyond_the_context_and_duplicates_are_counted(tmp_path: Path) -> None:
    texts = ["x" * 600, "y" * 490, "z", "z", None]
    expected = {"error": (1, 0), "skip": (1, 0), "truncate_left": (1, 1), "truncate_right": (1, 1)}
    for policy, (too_long, truncated) in expected.items():
        prompt = {"text": "{{ id }}", "on_too_long": policy, "on_null": "skip"}
        found = planned(tmp_path, prompt, {"id": texts})
        assert (found["context"]["too_long"], found["context"]["truncated"]) == (too_long, truncated)
        assert found["context"]["near_limit"] == 1 + truncated
        assert found["duplicates"] == {"prompts": 1, "tokens": 1}
        assert found["skipped"] == ({"on_null": 1, "on_too_long": 1} if policy == "skip" else {"on_null": 1})


@pytest.mark.parametrize(("seconds", "words"), [(3, "about 3 s"), (600, "about 10 min"), (36000, "about 10.0 h")])
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_an_excerpt_is_one_line() -> None:
    assert excerpt("a\nb") == '"a\\nb"'
    assert len(excerpt("x" * 10_000)) < 200


def test_the_best_rate_of_a_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(found: float, place: str) -> float:
        monkeypatch.setattr("batchgen.jobs.estimate.measure_operations_per_second", lambda: found)
        return machine_rate(tmp_path / place)

    assert rate(5e9, "a/rates.json") == 5e9
    assert rate(4e9, "a/rates.json") == 5e9
    assert rate(7e9, "a/rates.json") == rate(6e9, "a/rates.json") == 7e9
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    assert rate(3e9, "broken.json") == 3e9
    assert rate(2e9, "broken.json") == 3e9
    assert rate(2e9, "broken.json/not a directory") == 2e9
    for number, content in enumerate(
        ["[]", "null", "3", '{"a": "b"}', '{"a": NaN, "b": 1e400, "c": 0}', "[" * 100_000]
    ):
        (tmp_path / f"{number}.json").write_text(content, encoding="utf-8")
        assert rate(3e9, f"{number}.json") == 3e9
        assert rate(2e9, f"{number}.json") == 3e9
