"""Ending early: by signals wherever they strike, by a deadline wherever the run is; nothing is published by halves."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_quickly, visible, write_rows
from sudden_death import SuddenDeath

from batchgen.engine.request import Request
from batchgen.jobs import Job, run
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.status import read_status
from batchgen.jobs.stop import Stop, Stopped

Command = Callable[[Job], Any]


def test_a_signal_is_noted_and_nothing_else_happens() -> None:
    stop = Stop()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "terminated"
        assert stop.is_due()
        with pytest.raises(Stopped):
            stop.check()
    assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_deadline_needs_no_signal() -> None:
    assert not Stop(datetime.now() + timedelta(hours=1)).is_due()
    stop = Stop(datetime.now() - timedelta(seconds=1))
    assert (stop.is_due(), stop.reason, stop.exit_code) == (True, "deadline", 4)


def test_a_deadline_counts_outside_the_main_thread(tmp_path: Path) -> None:
    write_rows(tmp_path, 3000)
    job = make_job(tmp_path, run__deadline="3s")
    reports: list[Any] = []
    thread = threading.Thread(
        target=lambda: reports.append(run(job, models=FakeModels(FakeEngine(seconds=0.05)))), daemon=True
    )
    thread.start()
    thread.join(60)
    assert (reports[0].exit_code, reports[0].stopped) == (4, "deadline")
    assert visible(tmp_path / "out") == []
    assert 0 < read_status(tmp_path / "out").done < 3000


def test_what_had_finished_at_a_signal_is_kept(tmp_path: Path) -> None:
    write_rows(tmp_path, 400)
    finished: list[int] = []

    def before(request: Request) -> None:
        finished.append(request.key)
        if len(finished) == 100:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    report = run(make_job(tmp_path, run__checkpoint_seconds=60), models=FakeModels(FakeEngine(before, seconds=0.01)))
    assert (report.exit_code, report.stopped) == (130, "interrupted")
    done = read_status(tmp_path / "out").done
    assert len(finished) <= done < 400  # those before the prompt failed count as done too
    models = FakeModels()
    assert run(make_job(tmp_path), models=models).exit_code == 0
    assert not set(models.fake.asked) & set(finished)


def stages(folder: Path) -> Iterator[tuple[str, Command]]:
    """A job before its first run, before a night with new rows, and before a retry."""
    write_rows(folder, 9)
    yield "first", lambda job: run(job, models=FakeModels())
    write_rows(folder, 9, start=9, mode="a")
    yield "growth", lambda job: run(job, models=FakeModels())
    yield "retry", lambda job: run(job, RunOptions(retry=parse_retry("length,errors")), FakeModels())


@pytest.mark.slow
@pytest.mark.parametrize(("form", "stride"), [("arrow", 1), ("parquet", 3), ("jsonl", 3)])
def test_terminated_at_every_change_of_the_file_system(
    tmp_path: Path, form: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, output__format=form, prompt__on_null="skip", run__checkpoint_seconds=60)
    output = tmp_path / "out"
    for name, command in stages(tmp_path):
        start = tmp_path / f"before-{name}"
        if output.exists():
            shutil.copytree(output, start)
        old, codes = what_is_there(output, form), set()
        for at in range(1, 1000, stride):
            with monkeypatch.context() as patch:
                death = SuddenDeath(patch, at, number=signal.SIGTERM)
                codes.add(command(job).exit_code)
            seen = what_is_there(output, form)
            assert not (output / "__batchgen__" / "commit.json").exists()
            run(job, models=FakeModels())
            new = what_is_there(output, form)
            assert seen in (old, new), f"{name}, change {at}"
            assert manifest(output)["state"] == "finished"
            shutil.rmtree(output)
            if not death.struck:
                break
            if start.exists():
                shutil.copytree(start, output)
        assert codes == {0, 143}
        run(job, models=FakeModels())
        assert what_is_there(output, form) == new


def what_is_there(output: Path, form: str) -> Any:
    """Names and rows that a reader sees; a mix of two states cannot be read or holds other rows."""
    return (visible(output), read_quickly(output, form)) if output.exists() and visible(output) else None


@pytest.mark.parametrize("moment", ["_move", "write_json", "sync_directory"])
def test_once_begun_a_commit_goes_through(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.jobs import commit

    write_rows(tmp_path, 20)
    job = make_job(tmp_path)
    run(job, models=FakeModels())
    write_rows(tmp_path, 10, start=20, mode="a")
    real = getattr(commit, moment)

    def signalled(*arguments: Any) -> Any:
        if commit.is_committing(tmp_path / "out" / "__batchgen__"):
            signal.raise_signal(signal.SIGTERM)
            monkeypatch.setattr(commit, moment, real)
        return real(*arguments)

    monkeypatch.setattr(commit, moment, signalled)
    report = run(job, models=FakeModels())
    assert (report.exit_code, report.stopped, report.counts["rows"]) == (0, None, 30)
    assert manifest(tmp_path / "out")["final_rows"] == 30
    assert len(read_quickly(tmp_path / "out", "arrow")) == 30
    assert run(job, models=FakeModels()).asked == 0
