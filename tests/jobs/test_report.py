"""`batchgen report`: one page that needs nothing else, true to what stands in the output, finished or not."""

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from fake_models import FakeEngine, FakeModels
from job_files import make_job, read_output, write_rows

from batchgen.engine.request import Request
from batchgen.jobs import cli, run
from batchgen.jobs.charts import _memory, _speed, charts_of
from batchgen.jobs.command_report import report_output
from batchgen.jobs.findings import Moment, _moments, _thin, read_findings
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.stop import Stop


def figures(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.search(r"^const charts = (.*);$", page, re.MULTILINE)[1])
    return found


def expiring(after: int) -> tuple[Stop, Callable[[Request], None]]:
    """A deadline that comes when the engine has been asked so many rows."""
    stop, asked = Stop(datetime.now() + timedelta(hours=1)), count(1)

    def expire(request: Request) -> None:
        if next(asked) == after:
            stop._deadline = datetime.now()

    return stop, expire


def test_figures_are_those_of_the_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, 60)
    run(make_job(tmp_path, run__price_per_hour=3.0), models=FakeModels())
    findings, rows = read_findings(tmp_path / "out"), read_output(tmp_path / "out")
    assert findings.usage["completion_tokens"].tolist() == [row["usage"]["completion_tokens"] for row in rows]
    assert findings.finish_reasons == {
        reason: sum(row["finish_reason"] == reason for row in rows) for reason in ("stop", "length", "error")
    }
    (failure,) = findings.failures
    assert (failure.code, failure.stage, failure.rows) == ("null_value", "prompt", 5)
    assert [position for position, _ in failure.examples] == [5, 16, 27]
    most = max(range(60), key=lambda at: rows[at]["usage"]["prompt_tokens"] + rows[at]["usage"]["completion_tokens"])
    assert findings.expensive[0].position == most
    charts = {chart.name: chart.figure for chart in charts_of(findings)}
    for name, column in (("prompt", "prompt_tokens"), ("output", "completion_tokens")):
        lengths = findings.usage[column]
        assert sum(charts[name]["data"][0]["y"]) == np.count_nonzero(lengths)


@pytest.mark.parametrize("speculation", ["layer_skip", "auto", "off"])
def test_the_page_says_what_drafts_did(tmp_path: Path, speculation: str) -> None:
    write_rows(tmp_path, 8)
    model = tiny.tiny_model("llama3", tmp_path / "model")
    settings = {"model__path": str(model), "engine__memory": "1MiB", "engine__speculation": speculation}
    run(make_job(tmp_path, prompt__on_null="empty", generation__ignore_eos=True, **settings))
    page, done = report_output(tmp_path / "out").read_text(), read_findings(tmp_path / "out").manifest.speculation
    section = re.sub(r"<[^>]+>|\s+", " ", page[page.index("Speculation") :])
    share = f"{done['accepted_tokens'] / done['drafted_tokens']:.0%}" if done["drafted_tokens"] else "none"
    told = f"engine.speculation {speculation} steps {done['steps']} of them with drafts {done['drafted_steps']} "
    assert f"{told}drafted tokens {done['drafted_tokens']} of them accepted {share}" in re.sub(" +", " ", section)
    assert (done["drafted_steps"] > 0) == (speculation == "layer_skip") or speculation == "auto"


def test_the_page_stands_alone(tmp_path: Path) -> None:
    write_rows(tmp_path, 30)
    text = "The same long start <i>for</i> all rows: {{ word }}"
    job = make_job(tmp_path, name="</script><b>nice & plain", run__price_per_hour=3.0, prompt__text=text)
    run(job, models=FakeModels())
    path = report_output(tmp_path / "out")
    page = path.read_text()
    assert path == tmp_path / "out" / "__batchgen__" / "report.html"
    assert len(read_output(tmp_path / "out")) == 30  # the page disturbs no loader
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=|@import|url\(", markup)
    assert page.count("</script>") == page.count("<script>") == 2
    assert "&lt;/script&gt;&lt;b&gt;nice &amp; plain" in page
    assert set(figures(page)) == {"speed", "memory", "prompt", "output", "reasons", "reuse", "groups"}
    for name in figures(page):
        assert f'<div id="{name}">' in page
    assert "null_value" in page
    assert "cost at 3 an hour" in page
    assert "The same long start &lt;i&gt;for&lt;/i&gt; all rows" in page


def test_an_output_that_is_not_finished(tmp_path: Path) -> None:
    write_rows(tmp_path, 3000)
    stop, expire = expiring(after=60)
    run(make_job(tmp_path), models=FakeModels(FakeEngine(expire, seconds=0.01)), stop=stop)
    findings = read_findings(tmp_path / "out")
    assert 50 < len(findings.usage["prompt_tokens"]) == findings.status.done < 3000
    assert "still to do" in report_output(tmp_path / "out").read_text()


def test_rows_asked_again_count_once(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    job = make_job(tmp_path, run__checkpoint_seconds=0.001)
    run(job, models=FakeModels())
    stop, expire = expiring(after=3)
    models = FakeModels(FakeEngine(expire, seconds=0.05, width=1))
    write_rows(tmp_path, 200, start=40, mode="a")
    run(job, RunOptions(retry=parse_retry("errors,length")), models, stop)
    findings = read_findings(tmp_path / "out")
    assert len(findings.usage["prompt_tokens"]) == findings.status.done


def test_skipped_rows_are_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    run(make_job(tmp_path, prompt__on_null="skip"), models=FakeModels())
    findings = read_findings(tmp_path / "out")
    assert len(findings.usage["prompt_tokens"]) == len(read_output(tmp_path / "out")) == 36
    assert "skipped by policy" in report_output(tmp_path / "out").read_text()


def test_several_samples_count_each(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    run(make_job(tmp_path, generation__n=3, output__prefix="x_"), models=FakeModels())
    reasons = read_findings(tmp_path / "out").finish_reasons
    assert reasons["stop"] + reasons["length"] == 33
    assert reasons["error"] == 1


def test_no_rows_at_all(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"word": null}\n')
    run(make_job(tmp_path), models=FakeModels())
    page = report_output(tmp_path / "out").read_text()
    assert "Nothing to show" in page
    assert set(figures(page)) == {"memory", "reasons"}
    assert "Nothing to show: no rows begin alike" in page


def test_a_run_with_one_moment_is_seen_and_small_shares_differ() -> None:
    course = [[Moment(2.0, 2.0, 15.0, 3.0, 0.0004)]]
    for chart in (_speed(course), _memory(course)):
        assert chart.figure is not None
        assert chart.figure["data"][0]["mode"] == "lines+markers"
    assert _memory(course).figure["layout"]["yaxis"]["tickformat"] == ".3~%"  # type: ignore[index]


def test_rates_are_those_between_two_events() -> None:
    def event(seconds: float, rows: int, computed: int, output: int) -> dict[str, Any]:
        tokens = {"computed": computed, "reused": 2 * computed, "output": output}
        return {"seconds": seconds, "rows": rows, "tokens": tokens, "speed": {"kv_use": 0.5}}

    moments = _moments([event(2.0, 4, 10, 6), event(2.0, 4, 10, 6), event(4.0, 5, 10, 10)])
    assert moments == [Moment(2.0, 2.0, 15.0, 3.0, 0.5), Moment(4.0, 0.5, 0.0, 2.0, 0.5)]


def test_a_long_course_is_thinned_and_keeps_its_sum() -> None:
    course = [Moment(float(at + 1), float(at % 7), 1.0, 2.0, 0.1) for at in range(5000)]
    thin = _thin(course)
    assert len(thin) == 600
    assert thin[-1].seconds == 5000
    spans = np.diff([0.0, *(moment.seconds for moment in thin)])
    assert spans @ [moment.rows for moment in thin] == pytest.approx(sum(moment.rows for moment in course))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 3)
    run(make_job(tmp_path), models=FakeModels())
    assert cli.invoke(["report", str(tmp_path / "out"), "--to", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()
    assert cli.invoke(["report", str(tmp_path)]) == 2
    assert "no output of batchgen is here" in capsys.readouterr().err
    assert cli.invoke(["report", str(tmp_path / "out"), "--to", str(tmp_path / "no" / "page.html")]) == 1
    assert "name another place with --to" in capsys.readouterr().err
