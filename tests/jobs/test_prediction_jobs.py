"""A layer that a checkpoint ships to predict a further token, asked for by a job."""

from pathlib import Path

import pytest
import tiny
from job_files import manifest, read_output, write_job, write_rows
from tiny_mimo import tiny_mimo

from batchgen.jobs.cli import invoke


def test_a_job_answers_the_same_with_the_layer_of_its_checkpoint(tmp_path: Path) -> None:
    write_rows(tmp_path, 9)
    model = tiny_mimo(tmp_path / "model")
    settings = {"model__path": str(model), "model__dtype": "float32", "prompt__on_null": "empty"}
    for name, speculation in (("with", {"kind": "mtp", "tokens": 2}), ("without", "off")):
        job = write_job(tmp_path, **settings, engine__speculation=speculation, output__path=name)
        assert invoke(["run", str(job), "--quiet"]) == 0
    answers = [[row["completion"] for row in read_output(tmp_path / name)] for name in ("with", "without")]
    assert answers[0] == answers[1]
    drafted = [manifest(tmp_path / name)["speculation"]["drafted_tokens"] for name in ("with", "without")]
    assert drafted[0] > 0 == drafted[1]


def test_a_model_without_it_ends_a_job_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 3)
    model = tiny.tiny_model("qwen2", tmp_path / "model")
    job = write_job(tmp_path, model__path=str(model), engine__speculation={"kind": "mtp"}, prompt__on_null="empty")
    capsys.readouterr()
    assert invoke(["run", str(job), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert "engine.speculation: the model ships no layer that predicts a further token" in error
    assert error.count("\n") == 1
