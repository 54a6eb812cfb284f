"""Number formats over the runs of a job: settled once, told, stored, and the same after a resume."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_models import FakeModels
from job_files import make_job, write_rows

from batchgen.jobs import formats
from batchgen.jobs.command_run import RunArguments, run_command
from batchgen.jobs.formats import Work, describe_formats
from batchgen.jobs.job import Job

TRIAL = {
    "kind": "weights",
    "format": "int4",
    "time": 0.6,
    "asked": False,
    "taken": True,
    "broken": None,
    "perplexity_rise": 0.004,
    "divergence": 0.003,
    "same_choice": 0.99,
    "tokens": 900,
    "answer_tokens": 200,
    "rows": 8,
    "limits": {"rise": 0.01, "divergence": 0.01, "changed": 0.02},
}
REFUSED = {**TRIAL, "format": "int8", "taken": False, "broken": "perplexity +1.22%, limit +1.0%"}


@dataclass
class Choosing(FakeModels):
    """Measures nothing and chooses int4; keeps what it was asked."""

    asked: list[tuple[str, str, int]] = field(default_factory=list)
    loaded: list[tuple[str, str]] = field(default_factory=list)

    def formats(self, job: Job, prompts: Callable[[], Iterable[Sequence[int]]], shares: Any) -> Any:
        self.asked.append((job.model.weights, job.engine.kv_cache, len(list(prompts()))))
        weights = "int4" if job.model.weights == "auto" else job.model.weights
        return SimpleNamespace(weights=weights, kv_cache=job.engine.kv_cache, trials=(REFUSED, TRIAL), note=None)

    def engine(self, job: Job) -> Any:
        self.loaded.append((job.model.weights, job.engine.kv_cache))
        return super().engine(job)


@pytest.fixture(autouse=True)
def every_job_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "WORTH_TOKENS", 0)


def manifest(job: Job) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((job.output_path / "__batchgen__" / "manifest.json").read_text())
    return stored


def test_a_resume_takes_the_formats_of_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 8)
    job = make_job(tmp_path, prompt__on_null="empty")
    first, second = Choosing(), Choosing()
    assert run_command(job.with_limit(3), RunArguments(), models=first) == 0
    told = capsys.readouterr().err
    assert "weights int4: taken; perplexity +0.40%, KL 0.0030 over 900 tokens, same choice 99.00% of 200" in told
    assert "weights int8: refused (perplexity +1.22%, limit +1.0%)" in told
    assert run_command(job, RunArguments(), models=second) == 0
    assert [asked[:2] for asked in first.asked] == [("auto", "auto")]
    assert first.asked[0][2] == 3
    assert second.asked == []
    assert first.loaded == second.loaded == [("int4", "auto")]
    assert manifest(job)["formats"]["trials"] == [REFUSED, TRIAL]
    assert manifest(job)["settings"]["model"]["weights"] == "auto"


def test_weights_stay_when_another_kv_format_is_asked_for(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    job = make_job(tmp_path, prompt__on_null="empty")
    assert run_command(job.with_limit(3), RunArguments(quiet=True), models=Choosing()) == 0
    other = job.model_copy(update={"engine": job.engine.model_copy(update={"kv_cache": "int8"})})
    models = Choosing()
    assert run_command(other, RunArguments(quiet=True), models=models) == 0
    assert [asked[:2] for asked in models.asked] == [("int4", "int8")]
    assert models.loaded == [("int4", "int8")]


def test_a_format_that_is_taken_although_it_changes_a_little_too_much_is_told() -> None:
    (line,) = describe_formats({"trials": [{**TRIAL, "same_choice": 0.975}], "note": None})
    assert "same choice 97.50% of 200 answer tokens, within a standard error of 98%, 8 first rows" in line
    assert "within" not in describe_formats({"trials": [TRIAL], "note": None})[0]


def test_a_measurement_that_is_not_possible_is_told() -> None:
    assert describe_formats({"trials": [], "note": "not measured: too large"}) == ["formats: not measured: too large"]
    assert describe_formats({"trials": [], "note": None}) == []


@pytest.mark.parametrize(("weights", "computed"), [("auto", "native"), ("int4", "int4")])
def test_a_short_job_is_not_worth_a_measurement(
    tmp_path: Path, weights: str, computed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 8)
    job = make_job(tmp_path, prompt__on_null="empty", prompt__text="Say it", model__weights=weights)
    monkeypatch.setattr(formats, "WORTH_TOKENS", 100)  # 8 rows with 6 tokens in common and answers of up to 12
    models = Choosing()
    assert run_command(job, RunArguments(), models=models) == 0
    assert (models.asked, models.loaded) == ([], [(computed, "auto")])
    assert (
        "formats: not measured: for about 54 tokens to compute it does not pay (from 100 on" in capsys.readouterr().err
    )
    monkeypatch.setattr(formats, "WORTH_TOKENS", 54)
    other = job.model_copy(update={"output": job.output.model_copy(update={"path": "two"})})
    assert run_command(other, RunArguments(), models=models) == 0
    assert len(models.asked) == 1


def test_work_counts_what_is_shared_once() -> None:
    assert Work(10, 4).tokens([[1, 2, 3], [1, 2, 4]]) == 10 * (4 / 2 + 2)
    assert Work(10, 4).tokens([]) == 0


def test_first_rows_are_taken_from_as_many_batches_as_it_needs(tmp_path: Path) -> None:
    """A file may begin with a row group of one row."""
    table = pa.table({"topic": [f"topic {at}" for at in range(300)]})
    with pq.ParquetWriter(tmp_path / "rows.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 1))
        writer.write_table(table.slice(1), row_group_size=100)
    job = make_job(tmp_path, input__path="rows.parquet", prompt__text="{{ topic }}")
    models = Choosing()
    assert run_command(job, RunArguments(quiet=True), models=models) == 0
    assert models.asked[0][2] == formats.FIRST_ROWS
