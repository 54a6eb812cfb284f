"""The command line: exit codes, one-line errors, what is imported, and what the terminal shows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_output, visible, write_job, write_rows
from tiny import tiny_model

from batchgen.jobs import Job, cli
from batchgen.jobs.command_run import RunArguments, run_command
from batchgen.jobs.lock import Lock
from batchgen.jobs.status import read_status
from batchgen.jobs.stop import Stop

SUPPORT = str(Path(__file__).parent.parent / "support")

CHILD = """
import json, sys
from batchgen.jobs import cli
code = cli.invoke(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
print(json.dumps({"code": code, "heavy": heavy}))
"""

RUN = """
import sys
from batchgen.jobs import cli, models
from fake_models import FakeEngine, FakeModels
fake = FakeModels(FakeEngine(seconds=float(sys.argv[1])))
for name in dir(models.Models):
    if not name.startswith("_"):
        setattr(models.Models, name, staticmethod(getattr(fake, name)))
sys.exit(cli.invoke(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("model"))


def invoke(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.invoke([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def child(*arguments: object) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done


def start_run(seconds: float, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", RUN, str(seconds), "run", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": SUPPORT}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_rows(output: Path) -> None:
    journal = output / "__batchgen__" / "journal"
    for _ in range(6000):
        if len(list(journal.glob("*.arrow"))) >= 4:
            return
        time.sleep(0.01)
    pytest.fail("no row was ever finished")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], "No such command 'frob'"),
        (["run"], "Missing argument 'JOB'"),
        (["run", "job.yaml", "--frob"], "No such option"),
        (["run", "none.yaml"], "none.yaml: No such file"),
        (["check", "none.yaml"], "none.yaml: No such file"),
        (["status", "none"], "no output of batchgen is here"),
        (["run", "job.yaml", "--set", "x"], "must look like generation.max_tokens=32"),
        (["run", "job.yaml", "--retry", "all"], "--retry: knows errors and length"),
        (["run", "job.yaml", "--deadline", "9"], "--deadline: must be a time like 06:00"),
        (["run", "job.yaml", "--limit", "0"], "0 is not in the range"),
        (["run", "job.yaml", "--log-format", "xml"], "'xml' is not one of"),
        (["preview", "job.yaml", "-n", "0"], "0 is not in the range"),
        (["check", "job.yaml", "--set", "generation.temprature=1"], "unknown key, did you mean temperature?"),
        (["check", "job.yaml", "--set", "model.path=./none.gguf"], "model.path: ./none.gguf does not exist"),
        (["check", "job.yaml", "--set", "model.tokenizer=./none"], "model.tokenizer: ./none does not exist"),
        (["check", "job.yaml", "--set", "model.chat_template=n.jinja"], "model.chat_template: n.jinja does not exist"),
        (["check", "job.yaml", "--set", 'prompt.text="{% if %}"'], "job.yaml: prompt.text"),
        (["check", "job.yaml", "--set", 'prompt.text="{{ wrod }}"'], "has no column 'wrod', only word, nested"),
        (["check", "job.yaml", "--set", "generation.per_row={seed: s}"], "per_row.seed: the input has no column 's'"),
        (["check", "job.yaml", "--set", "output.columns=[x]"], "output.columns: the input has no column 'x'"),
        (["check", "job.yaml", "--set", "input.id=x"], "has no column 'x'"),
        (["check", "job.yaml", "--set", "output.path=rows.jsonl"], "is a file"),
        (["check", "job.yaml", "--set", "input.path=sub", "--set", "output.path=sub/out"], "lies inside the input"),
        (["check", "job.yaml", "--set", "output.path=."], "holds files that batchgen did not write"),
        (["check", "job.yaml", "--set", "generation.max_tokens=512"], "512 leaves no room for a prompt"),
        (["check", "job.yaml", "--set", "generation.max_tokens=256", "--set", "model.path=."], "config.json"),
    ],
)
def test_bad_usage_is_one_line(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 3)
    (tmp_path / "sub").mkdir()
    write_job(tmp_path, model__path=str(model))
    code, _, err = invoke(capsys, *arguments)
    assert words in err
    assert err.count("\n") == 1
    assert code == (1 if words == "config.json" else 2)
    assert visible(tmp_path) == ["job.yaml", "rows.jsonl"]


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    arguments = ["check", str(tmp_path / "none.yaml")]
    code, _, err = invoke(capsys, *(["--debug", *arguments] if place == "before" else [*arguments, "--debug"]))
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].endswith("No such file or directory")


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys)
    assert code == 2
    assert "Commands:" in err


def test_a_check_that_passes(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 3)
    path = write_job(tmp_path, model__path=str(model))
    code, out, err = invoke(capsys, "check", path)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{path}: ok"
    assert "context 512 tokens" in out
    assert "prompt uses: word" in out


def test_what_is_imported(tmp_path: Path, model: Path) -> None:
    write_rows(tmp_path, 3)
    path = write_job(tmp_path, model__path=str(model))
    for arguments in (["check", path], ["schema"], ["--help"]):
        found, _ = child(*arguments)
        assert found == {"code": 0, "heavy": []}, arguments
    assert child("run", path, "--quiet")[0]["code"] == 0
    assert child("status", tmp_path / "out")[0] == {"code": 0, "heavy": []}
    found, done = child("run", path)  # everything is done
    assert found == {"code": 0, "heavy": []}
    assert "nothing was left to do" in done.stderr


def test_importing_sets_no_environment_and_opens_nothing() -> None:
    code = (
        "import os, threading; before = dict(os.environ)\n"
        "import batchgen.jobs, batchgen.jobs.cli\n"
        "assert dict(os.environ) == before and threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_schema_is_that_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["properties"]) == {
        "name", "model", "input", "prompt", "generation", "steps", "output", "engine", "run",
    }  # fmt: skip
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["GenerationSettings"]["properties"]["max_tokens"]["default"] == 256


def test_every_command_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in cli.cli.commands.items():
        code, out, _ = invoke(capsys, name, "--help")
        assert code == 0
        assert "Usage: batchgen " + name in out
        assert command.help
        assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_plan_and_preview_on_a_tiny_model(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 30)
    path = write_job(tmp_path, model__path=str(model))
    code, out, err = invoke(capsys, "plan", path)
    assert (code, err) == (0, "")
    assert "rows: 30; 3 will fail (3 null_value); 0 skipped by policy" in out
    assert "sharing saves" in out
    code, out, _ = invoke(capsys, "plan", path, "--json")
    figures = json.loads(out)
    assert figures["rows"] == 30
    assert 0 < figures["distinct_prefix_tokens"] < figures["prompt_tokens"]
    code, out, err = invoke(capsys, "preview", path, "-n", 6)
    assert (code, err) == (0, "")
    assert out.count("--- row ") == 6
    assert "error null_value (prompt)" in out
    assert "Say word 4" in out
    assert visible(tmp_path) == ["job.yaml", "rows.jsonl"]


def test_a_run_on_a_tiny_model(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 20)
    path = write_job(tmp_path, model__path=str(model))
    code, out, err = invoke(capsys, "run", path)
    assert (code, out) == (0, "")
    assert "sampling: max_tokens 12 (job)" in err
    assert len(read_output(tmp_path / "out")) == 20
    code, _, err = invoke(capsys, "run", path, "--set", 'prompt.text="Tell {{ word }}"')
    assert code == 2
    assert "belongs to a different job (prompt.text: was" in err
    assert invoke(capsys, "check", path, "--set", "generation.seed=1")[0] == 2
    assert invoke(capsys, "run", path, "--set", "run.max_failures=1")[0] == 3
    assert invoke(capsys, "run", path, "--set", "engine.device=cuda:9", "--fresh")[0] == 2
    code, _, err = invoke(capsys, "status", tmp_path / "out")
    assert code == 0


def test_quiet_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 20)
    job = make_job(tmp_path)
    assert run_command(job, RunArguments(quiet=True), models=FakeModels()) == 0
    assert capsys.readouterr() == ("", "")
    assert run_command(job, RunArguments(log_format="json", fresh=True, yes=True), models=FakeModels()) == 0
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["event"] for event in events] == ["settings", "progress", "end"]
    assert events[1]["tokens"] == events[1]["tokens_total"]
    assert events[2]["counts"]["rows"] == 20


def test_fresh_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 5)
    path = write_job(tmp_path)
    run_command(Job.load(path), RunArguments(quiet=True), models=FakeModels())
    code, _, err = invoke(capsys, "run", path, "--fresh")
    assert code == 2
    assert "confirm with --yes" in err
    assert len(read_output(tmp_path / "out")) == 5


def test_limit(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    job = make_job(tmp_path)
    assert run_command(job, RunArguments(limit=4, quiet=True), models=FakeModels()) == 0
    assert len(read_output(tmp_path / "out")) == 4


def test_a_live_run_holds_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 5)
    path = write_job(tmp_path)
    (tmp_path / "out" / "__batchgen__").mkdir(parents=True)
    with Lock(tmp_path / "out" / "__batchgen__" / "lock.json"):
        done = start_run(0, path)
        assert done.wait(60) == 75
        assert done.stderr is not None
        assert "another run holds this output" in done.stderr.read()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_cleanly(tmp_path: Path, number: signal.Signals, code: int) -> None:
    write_rows(tmp_path, 5000)
    path = write_job(tmp_path, run__checkpoint_seconds=0.1, output__shard_rows=1000)
    process = start_run(0.02, path)
    wait_for_rows(tmp_path / "out")
    status = read_status(tmp_path / "out")
    assert (status.state, status.alive, (status.holder or {})["pid"]) == ("running", True, process.pid)
    assert 0 < status.done < status.rows == 5000
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "the same command continues" in err
    assert "Traceback" not in err
    assert visible(tmp_path / "out") == []
    assert not (tmp_path / "out" / "__batchgen__" / "lock.json").exists()
    models = FakeModels()
    job = Job.load(path)
    run_command(job, RunArguments(quiet=True), models=models)
    assert 0 < len(models.fake.asked) < 4545
    assert len(read_output(tmp_path / "out")) == 5000


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    write_rows(tmp_path, 5000)
    process = start_run(30, write_job(tmp_path))
    lock = tmp_path / "out" / "__batchgen__" / "manifest.json"
    while not lock.exists() or '"running"' not in lock.read_text() or '"digest": "bytes"' not in lock.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode in (-signal.SIGTERM, 143)


def test_the_deadline(tmp_path: Path) -> None:
    write_rows(tmp_path, 5000)
    job = make_job(tmp_path, run__checkpoint_seconds=0.1, run__deadline="1s", output__shard_rows=1000)
    assert run_command(job, RunArguments(quiet=True), models=FakeModels(FakeEngine(seconds=0.05))) == 4
    assert visible(tmp_path / "out") == []
    later = make_job(tmp_path, run__deadline="10h", output__shard_rows=1000)
    assert run_command(later, RunArguments(quiet=True), models=FakeModels()) == 0
    assert len(read_output(tmp_path / "out")) == 5000


def test_a_deadline_in_the_past_stops_before_the_model(tmp_path: Path) -> None:
    from datetime import datetime

    from batchgen.jobs import run

    write_rows(tmp_path, 5)
    models = FakeModels()
    report = run(make_job(tmp_path), models=models, stop=Stop(datetime(2000, 1, 1)))
    assert (report.exit_code, report.stopped, models.loads) == (4, "deadline", 0)


def test_unexpected_errors_are_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object, **__: object) -> None:
        raise KeyError("what")

    monkeypatch.setattr("batchgen.jobs.check.check_job", explode)
    write_rows(tmp_path, 3)
    code, _, err = invoke(capsys, "check", write_job(tmp_path))
    assert (code, err) == (1, "KeyError: 'what' (--debug shows where)\n")


def test_a_full_disk_is_told_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere/file")

    monkeypatch.setattr("batchgen.jobs.command_run.run", full)
    write_rows(tmp_path, 3)
    code, _, err = invoke(capsys, "run", write_job(tmp_path))
    assert code == 1
    assert err == (
        "/somewhere/file: the disk is full; finished rows are kept, free space and give the same command again\n"
    )


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_job_whose_rows_all_fail_is_not_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"word": null}\n' * 3)
    assert run_command(make_job(tmp_path), RunArguments(quiet=True, log_format=log_format), models=FakeModels()) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert "all 3 rows failed, the first with null_value: column 'word' is null" in line
    write_rows(tmp_path, 12, mode="a")
    assert run_command(make_job(tmp_path), RunArguments(quiet=True), models=FakeModels()) == 0
    assert capsys.readouterr().err == ""


def test_what_the_engine_came_to_is_told_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 3)
    run_command(make_job(tmp_path), RunArguments(), models=FakeModels())
    told = capsys.readouterr().err.splitlines()
    assert told[1].startswith("formats: not measured")
    assert told[2] == "engine: device cpu, dtype float32, weights native"
    resolved = {"device": "cpu", "dtype": "float32", "weights": "native"}
    kept = manifest(tmp_path / "out")
    limits = {name: kept["choices"]["settings"][name] for name in ("max_batch_tokens", "max_sequences")}
    assert kept["settings"]["resolved_engine"] == resolved | limits
