"""Killed anywhere, the same command goes on: every row once, the result that of an uninterrupted run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeModels
from job_files import make_job, read_output, read_quickly, visible, write_job, write_rows
from sudden_death import FULL_DISK, Killed, SuddenDeath, bury
from tiny import tiny_model

from batchgen.jobs import Job, run
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions

ROWS = 20


def snapshot(output: Path, form: str) -> list[dict[str, Any]] | None:
    """What a reader sees; None when nothing is published."""
    return read_quickly(output, form) if visible(output) else None


def outcomes(folder: Path, form: str) -> Iterator[tuple[str, Callable[[Job, FakeModels], Any]]]:
    """A job before its first run, before a night with new rows, and before a retry."""
    write_rows(folder, ROWS)
    yield "first", lambda job, models: run(job, models=models)
    write_rows(folder, 9, start=ROWS, mode="a")
    yield "growth", lambda job, models: run(job, models=models)
    yield "retry", lambda job, models: run(job, RunOptions(retry=parse_retry("length,errors")), models)
    if form == "arrow":
        yield "fresh", lambda job, models: run(job, RunOptions(fresh=True), models)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a heartbeat dies too
@pytest.mark.slow
@pytest.mark.parametrize(("form", "stride"), [("arrow", 2), ("parquet", 3), ("jsonl", 3)])
def test_killed_at_every_change_of_the_file_system(
    tmp_path: Path, form: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, output__format=form, prompt__on_null="skip", run__checkpoint_seconds=60)
    output = tmp_path / "out"
    for name, command in outcomes(tmp_path, form):
        start = tmp_path / f"before-{name}"
        if output.exists():
            shutil.copytree(output, start)
        old = snapshot(output, form) if output.exists() else None
        for at in range(1, 1000, 1 if name in ("first", "growth") else stride):
            struck = kill_once(lambda command=command: command(job, FakeModels()), at, monkeypatch)
            bury(output)
            committing = (output / "__batchgen__" / "commit.json").exists()
            seen = snapshot_or_broken(output, form)
            models = FakeModels()
            run(job, models=models)
            new = read_quickly(output, form)
            between = committing or name == "fresh"  # the earlier output is on its way out
            assert seen in (old, new) or (seen in (None, "broken") and between), f"{name}, change {at}"
            assert [row["nested"]["list"][0] for row in new] == expected_rows(job), f"{name}, change {at}"
            assert not (output / "__batchgen__" / "journal").exists()
            if not struck:
                break
            restore(start, output)
        else:
            pytest.fail("the run does not end")
        assert at > 10
        whole = make_job(tmp_path, output__format=form, prompt__on_null="skip", output__path=f"whole-{name}")
        run(whole, models=FakeModels())
        assert read_output(output, form) == new == read_output(tmp_path / f"whole-{name}", form)
        assert visible(output) == visible(tmp_path / f"whole-{name}")


def kill_once(command: Callable[[], Any], at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        death = SuddenDeath(patch, at)
        with suppress(Killed):
            command()
    return death.struck


def restore(start: Path, output: Path) -> None:
    shutil.rmtree(output)
    if start.exists():
        shutil.copytree(start, output)


def expected_rows(job: Job) -> list[int]:
    total = sum(1 for _ in (job.base / "rows.jsonl").open())
    return [at for at in range(total) if at % 11 != 5]


def snapshot_or_broken(output: Path, form: str) -> Any:
    """Between two renames of a commit an `arrow` output cannot be loaded; what can be loaded must be whole."""
    if not output.exists() or not visible(output):
        return None
    try:
        return read_quickly(output, form)
    except FileNotFoundError:
        return "broken"


@pytest.mark.parametrize("form", ["arrow"])
def test_a_full_disk_at_every_change(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, output__format=form, run__checkpoint_seconds=60)
    write_rows(tmp_path, ROWS)
    for at in range(1, 1000):
        failed = False
        with monkeypatch.context() as patch:
            death = SuddenDeath(patch, at, FULL_DISK)
            try:
                run(job, models=FakeModels())
            except OSError:
                failed = True
        assert failed or not death.struck or len(read_output(tmp_path / "out", form)) == ROWS
        assert not (tmp_path / "out" / "__batchgen__" / "lock.json").exists() or failed
        bury(tmp_path / "out")
        run(job, models=FakeModels())
        assert len(read_output(tmp_path / "out", form)) == ROWS
        shutil.rmtree(tmp_path / "out")
        if not death.struck:
            return
    pytest.fail("the run does not end")


CHILD = """
import sys
from batchgen.jobs import Job, run
from fake_models import FakeEngine, FakeModels
run(Job.load(sys.argv[1]), models=FakeModels(FakeEngine(seconds=0.01)))
"""


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    write_rows(tmp_path, 900)
    path = write_job(tmp_path, run__checkpoint_seconds=0.2, output__shard_rows=100)
    choose = random.Random(7)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "support")}
    kills, left = 0, []
    for _ in range(60):
        process = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], env=environment)
        wait_for_lock(tmp_path / "out", process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(choose.uniform(0.0, 0.45) if kills < 20 else 120)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
            assert visible(tmp_path / "out") == [] or kills == 20
        if process.wait() == 0:
            break
        left.append(process.returncode)
    assert kills == 20
    assert set(left) == {-signal.SIGKILL}
    run(make_job(tmp_path, output__path="whole", output__shard_rows=100), models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")


@pytest.mark.slow
def test_a_real_engine_killed_and_resumed(tmp_path: Path) -> None:
    model = tiny_model("llama3", tmp_path / "model")
    write_rows(tmp_path, 120)
    settings: dict[str, Any] = {
        "model__path": str(model), "model__dtype": "float32", "generation__max_tokens": 100, "generation__n": 2,
        "run__checkpoint_seconds": 0.05, "engine__max_sequences": 4,
    }  # fmt: skip
    path = write_job(tmp_path, **settings)
    command = [sys.executable, "-c", "from batchgen.jobs.cli import main; main()", "run", str(path)]
    for _ in range(3):
        process = subprocess.Popen(command)
        wait_for_news(tmp_path / "out" / "__batchgen__" / "journal", process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert visible(tmp_path / "out") == []
    run(Job.load(path))
    run(make_job(tmp_path, **settings, output__path="whole"))
    assert answers_of(tmp_path / "out") == answers_of(tmp_path / "whole")


def answers_of(output: Path) -> list[Any]:
    return [(row["word"], row["completion"], row["finish_reason"], row["error"]) for row in read_output(output)]


def wait_for_news(journal: Path, process: "subprocess.Popen[bytes]") -> None:
    before = len(list(journal.glob("*.arrow")))
    while len(list(journal.glob("*.arrow"))) < before + 2:
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.01)


def wait_for_lock(output: Path, process: "subprocess.Popen[bytes]") -> None:
    lock = output / "__batchgen__" / "lock.json"
    while process.poll() is None:
        with suppress(OSError, ValueError):
            if json.loads(lock.read_text())["pid"] == process.pid:
                return
        time.sleep(0.005)
