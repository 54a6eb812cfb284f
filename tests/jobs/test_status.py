"""Status: true at every moment of a run, while it publishes too; no token counts twice."""

import shutil
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, write_rows
from sudden_death import Killed, SuddenDeath

from batchgen.engine.request import Completion, Request, RowError
from batchgen.jobs import run, status
from batchgen.jobs.errors import UsageError
from batchgen.jobs.manifest import Manifest
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.status import describe_status, read_status


def test_asked_again_counts_once(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    job = make_job(tmp_path, prompt__on_null="skip")
    run(job, models=FakeModels())
    write_rows(tmp_path, 10, start=40, mode="a")
    again = RunOptions(retry=parse_retry("length"))
    for _ in range(2):  # the second asks rows again that the first has journaled already
        seen: list[int] = []

        def before(request: Request, seen: list[int] = seen) -> None:
            seen.append(request.key)
            if len(seen) > 12:
                raise RuntimeError("gone")

        with pytest.raises(RuntimeError):
            run(job, again, FakeModels(FakeEngine(before, seconds=0.03)))
    stop_before_publishing(job)
    found = read_status(tmp_path / "out")
    assert found.left == 0
    run(job, models=FakeModels())
    assert found.tokens == manifest(tmp_path / "out")["tokens"]
    assert found.counts == manifest(tmp_path / "out")["counts"]


def test_an_error_that_a_later_run_cured_is_none(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def _complete(self, request: Request) -> Completion:
            done = super()._complete(request)
            return replace(done, samples=(), error=RowError("engine", "generate", "larger than the memory", True))

    def gone(request: Request) -> None:
        raise RuntimeError("the device is gone")

    write_rows(tmp_path, 20)
    job = make_job(tmp_path, prompt__on_null="skip")
    run(job, models=FakeModels(Broken()))
    assert "larger than the memory" in (read_status(tmp_path / "out").last_error or "")
    again = RunOptions(retry=parse_retry("errors"))
    with pytest.raises(RuntimeError):
        run(job, again, FakeModels(FakeEngine(gone)))
    assert "the device is gone" in (read_status(tmp_path / "out").last_error or "")
    run(job, again, FakeModels())
    assert read_status(tmp_path / "out").last_error is None


def stop_before_publishing(job: Any) -> None:
    """Everything is generated, then a signal comes."""

    class Last(FakeEngine):
        def _run(self, requests: Any) -> Any:
            yield from super()._run(requests)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    assert run(job, models=FakeModels(Last())).exit_code == 143


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a heartbeat dies too
@pytest.mark.parametrize("stage", ["first", "growth"])
def test_status_at_every_change_of_the_file_system(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process would see at that moment: never an error, and the rows of before or all of them.

    Which change is the nth varies with the threads, so the order of the moments is not asserted.
    """
    write_rows(tmp_path, 9)
    job = make_job(tmp_path, output__format="arrow", run__checkpoint_seconds=60)
    if stage == "growth":
        run(job, models=FakeModels())
        write_rows(tmp_path, 9, start=9, mode="a")
    monkeypatch.setattr(status, "_RETRY_SECONDS", 0.0)
    kept = tmp_path / "kept"
    if (tmp_path / "out").exists():
        shutil.copytree(tmp_path / "out", kept)
    states, done = [], []
    for at in range(1, 1000):
        with monkeypatch.context() as patch:
            death = SuddenDeath(patch, at)
            with suppress(Killed):
                run(job, models=FakeModels())
        try:
            found = read_status(tmp_path / "out")
        except UsageError:  # before the first manifest
            assert not states
        else:
            states.append(found.state)
            done.append(found.done)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if not death.struck:
            break
        if kept.exists():
            shutil.copytree(kept, tmp_path / "out")
    assert states[-1] == "finished"
    assert "publishing" in states
    before, after = (9, 18) if stage == "growth" else (0, 9)
    assert set(done) == {before, after}
    assert done[-1] == after


def test_a_run_that_publishes_in_the_middle_of_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, 20)
    job = make_job(tmp_path)
    run(job, models=FakeModels())
    load = Manifest.load
    calls: list[Path] = []

    def late(path: Path) -> Any:
        found = load(path)
        calls.append(path)
        if len(calls) == 1:
            assert found is not None
            found.final_rows += 1  # as read before a commit that the files are already after
            found.num_rows += 1
        return found

    monkeypatch.setattr(Manifest, "load", late)
    assert read_status(tmp_path / "out").counts == manifest(tmp_path / "out")["counts"]
    assert len(calls) == 2


def test_speed_is_told_in_words_and_plain_numbers(tmp_path: Path) -> None:
    write_rows(tmp_path, 3)
    run(make_job(tmp_path), models=FakeModels())
    speed = {
        "rows_per_second": 0.04, "prompt_tokens_per_second": 123456.7, "output_tokens_per_second": 12.34,
        "reuse": 0.251, "kv_use": 0.5,
    }  # fmt: skip
    lines = list(describe_status(replace(read_status(tmp_path / "out"), speed=speed)))
    expected = "speed: 0.04 rows/s, 123457 prompt tokens/s, 12.3 output tokens/s, 25% of prompt tokens reused"
    assert expected in lines
