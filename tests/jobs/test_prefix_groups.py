"""Prefix groups counted on the way: those of the whole plan, in memory that does not grow, told in the manifest."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeEngine, FakeModels
from hypothesis import given
from hypothesis import strategies as st
from job_files import make_job, manifest, write_rows

from batchgen.engine.backlog import Announced
from batchgen.engine.plan import plan
from batchgen.engine.request import Completion, Request
from batchgen.jobs import prefix_groups, run
from batchgen.jobs.prefix_groups import PrefixGroups, merged


def groups_of(prompts: list[list[int]]) -> PrefixGroups:
    groups = PrefixGroups()
    for prompt in prompts:
        groups.add(prompt)
    groups.close()
    return groups


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30))
def test_groups_save_what_the_plan_saves(prompts: list[list[int]]) -> None:
    """Every prefix that more prompts have than any longer one is a group, and together they save all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_groups, "_SHORTEST", 1)
        patch.setattr(prefix_groups, "MOST", 1000)
        ordered = [prompts[index] for index in plan(prompts).order]
        found = groups_of(ordered).largest
    assert sum(group.saved for group in found) == sum(map(len, prompts)) - plan(prompts).distinct_tokens
    having = Counter(tuple(prompt[:length]) for prompt in prompts for length in range(1, len(prompt) + 1))
    for group in found:
        assert having[(group.start + group.end)] == group.rows
        assert len(group.start + group.end) == group.length


def test_only_the_largest_are_kept() -> None:
    prompts = [[group] * 40 + [row] for group in range(30) for row in range(2 + group)]
    found = groups_of(prompts).largest
    assert [group.rows for group in found] == [31 - at for at in range(prefix_groups.MOST)]


def test_long_prefixes_keep_their_ends() -> None:
    (group, *_) = groups_of([[*range(500), at] for at in range(3)]).largest
    assert (group.length, group.start, group.end) == (500, tuple(range(64)), tuple(range(436, 500)))


def test_the_manifest_tells_them(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    run(make_job(tmp_path, prompt__text="A long instruction for all of them: {{ word }}"), models=FakeModels())
    largest = manifest(tmp_path / "out")["prefix_groups"][0]
    assert largest["rows"] == 18  # two words are null
    assert largest["prefix_tokens"] == len("A long instruction for all of them: word ")
    assert largest["saved_tokens"] == 17 * largest["prefix_tokens"]
    assert largest["excerpt"] == "A long instruction for all of them: word "


def test_runs_of_one_job_add_up() -> None:
    one, other = ({"saved_tokens": saved} for saved in (5, 9))
    assert merged([one], [other]) == [other, one]
    assert len(merged([one] * 8, [other])) == 8


def test_a_job_tells_the_engine_how_its_rows_end(tmp_path: Path) -> None:
    """Through everything that stands between the rows and the engine."""
    write_rows(tmp_path, 8)
    rests: list[Any] = []

    class Listening(FakeEngine):
        def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
            assert isinstance(requests, Announced)
            for request in requests:
                time.sleep(0.01)
                rests.append(requests.rest())
                yield self._complete(request)

    run(make_job(tmp_path, prompt__on_null="empty"), models=FakeModels(Listening()))
    assert len(rests) == 8
    assert sum(rests[-2].values()) == 1
    assert rests[-1] == {}
