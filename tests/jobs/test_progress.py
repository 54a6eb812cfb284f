"""Progress: ends at exactly 100 %, whatever rows were, and never says less than it knows."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_models import FakeEngine, FakeModels
from hypothesis import given
from hypothesis import strategies as st
from job_files import make_job, manifest, write_rows

from batchgen.jobs import progress as progress_module
from batchgen.jobs import run
from batchgen.jobs.progress import Bar, Lines, Meter, Silence, Snapshot, choose_display
from batchgen.jobs.run import RunOptions


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def statistics(**values: int) -> Any:
    return SimpleNamespace(**{"computed_prompt_tokens": 0, "cached_prompt_tokens": 0, "output_tokens": 0, **values})


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30))
def test_the_total_meets_the_count_at_the_end(rows: list[tuple[int, int, int]]) -> None:
    meter, counters = Meter(len(rows)), statistics()
    for computed, cached, output in rows:
        counters.computed_prompt_tokens += computed
        counters.cached_prompt_tokens += cached
        counters.output_tokens += output
        before = meter.snapshot(counters)
        assert before.tokens < before.tokens_total
        meter.finished(1, computed + cached, output)
    end = meter.snapshot(counters)
    assert end.tokens == end.tokens_total == sum(map(sum, rows))
    assert end.rows_done == end.rows_total


def test_counters_that_start_anew_are_added_up() -> None:
    meter = Meter(2)
    assert meter.snapshot(statistics(output_tokens=5)).output_tokens == 5
    assert meter.snapshot(statistics(output_tokens=2)).output_tokens == 7


def test_what_the_engine_has_done_before_does_not_count() -> None:
    """A step of a job begins with an engine that earlier steps have used."""
    used = statistics(output_tokens=5)
    meter = Meter(2, used)
    assert meter.snapshot(used).output_tokens == 0
    assert meter.snapshot(statistics(output_tokens=2)).output_tokens == 2


def test_drafts_of_all_runs_are_told_in_manifest_and_log(tmp_path: Path) -> None:
    meter = Meter(2)
    assert meter.snapshot(statistics(steps=5, drafted_tokens=4)).speculation["drafted_tokens"] == 4
    both = meter.snapshot(statistics(steps=2, drafted_tokens=3)).speculation
    assert both == {"steps": 7, "drafted_steps": 0, "drafted_tokens": 7, "accepted_tokens": 0}
    write_rows(tmp_path, 3)
    models = FakeModels()
    counted = models.fake.statistics
    models.fake.before = lambda request: vars(counted).update(drafted_tokens=9, accepted_tokens=6)
    run(make_job(tmp_path), RunOptions(quiet=True), models)
    told = {"steps": 0, "drafted_steps": 0, "drafted_tokens": 9, "accepted_tokens": 6}
    assert manifest(tmp_path / "out")["speculation"] == told
    events = map(json.loads, (tmp_path / "out" / "__batchgen__" / "log.jsonl").read_text().splitlines())
    assert [event["speculation"] for event in events if event["event"] == "progress"][-1] == told


def test_figures() -> None:
    snapshot = Snapshot(5, 10, 10.0, 60, 20, 20, 200, 0.5, host_wait=2.5)
    assert snapshot.rates == {
        "rows_per_second": 0.5,
        "prompt_tokens_per_second": 8.0,
        "output_tokens_per_second": 2.0,
        "reuse": 0.25,
        "kv_use": 0.5,
        "host_wait": 0.25,
    }
    assert snapshot.seconds_left == 10.0
    assert Snapshot(0, 10, 10.0, 60, 20, 20, 200, 0.5).seconds_left is None


def test_the_bar_shows_all_figures_and_ends_full() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.show(Snapshot(5, 10, 10.0, 60, 20, 20, 200, 0.5))
    bar.show(Snapshot(10, 10, 20.0, 60, 20, 20, 100, 0.5))
    bar.close()
    shown = stream.getvalue()
    for words in ("50%", "5/10 rows", "0.5 rows/s", "prompt 8 tok/s", "output 2 tok/s", "reuse 25%", "KV 50%"):
        assert words in shown
    assert "100%" in shown.splitlines()[-1]


def test_rows_without_a_token_end_full_too() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.show(Snapshot(3, 3, 1.0, 0, 0, 0, 0, 0.0))
    bar.close()
    assert "100%" in stream.getvalue()


def test_lines() -> None:
    stream = io.StringIO()
    Lines(stream, as_json=False).show(Snapshot(5, 10, 10.0, 60, 20, 20, 200, 0.5))
    Lines(stream, as_json=True).show(Snapshot(0, 10, 10.0, 60, 20, 20, 200, 0.5))
    text, encoded = stream.getvalue().splitlines()
    assert text.startswith("5/10 rows, 0.5 rows/s, prompt 8 tok/s")
    assert text.endswith("about 10 s left")
    assert json.loads(encoded)["seconds_left"] is None


def test_where_what_is_shown() -> None:
    assert isinstance(choose_display(True, "text", Terminal()), Silence)
    assert isinstance(choose_display(False, "text", Terminal()), Bar)
    assert isinstance(choose_display(False, "json", Terminal()), Lines)
    lines = choose_display(False, "text", io.StringIO())
    assert isinstance(lines, Lines)
    assert lines.seconds == 30


@pytest.mark.parametrize("samples", [1, 3])
def test_a_whole_job_ends_at_exactly_100_percent(tmp_path: Path, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Snapshot] = []
    take = Meter.snapshot

    def watched(self: Meter, statistics: Any) -> Snapshot:
        seen.append(take(self, statistics))
        return seen[-1]

    monkeypatch.setattr(Meter, "snapshot", watched)
    monkeypatch.setattr(progress_module.Silence, "seconds", 0.01)
    write_rows(tmp_path, 30)
    write_rows(tmp_path, 30, mode="a")  # equal prompts
    job = make_job(tmp_path, generation__n=samples, prompt__on_null="skip")
    run(job.with_limit(20), RunOptions(), FakeModels(FakeEngine(seconds=0.02)))
    run(job, RunOptions(), FakeModels(FakeEngine(seconds=0.02)))
    end = seen[-1]
    assert end.tokens == end.tokens_total > 0
    assert (end.rows_done, end.rows_total) == (40, 40)
    assert all(snapshot.tokens <= snapshot.tokens_total for snapshot in seen)
