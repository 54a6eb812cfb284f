"""A job of steps killed at any change of the file system: the same command goes on, every row once in every step."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeModels
from job_files import make_job, read_quickly, visible, write_rows
from sudden_death import FULL_DISK, Killed, SuddenDeath, bury

from batchgen.jobs import Job, run
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions

STEPS = [
    {"name": "outline", "prompt": {"text": "Outline {{ word }}"}},
    {"name": "review", "prompt": {"text": "Review {{ outline_completion }}", "on_null": "skip"}},
]
ROWS = 14


def chain(folder: Path, first_tokens: int = 12, **overrides: Any) -> Job:
    steps = [{**STEPS[0], "generation": {"max_tokens": first_tokens}}, *STEPS[1:]]
    return make_job(folder, prompt=None, steps=steps, run__checkpoint_seconds=60, **overrides)


def commands(folder: Path) -> Iterator[tuple[str, int, int, Callable[[Job], Any]]]:
    """A job before its first run, before a night with new rows, and before a retry that changes answers.

    Each with the tokens of the first step, and how many changes lie between two kills.
    """
    write_rows(folder, ROWS)
    yield "first", 12, 13, lambda job: run(job, models=FakeModels())
    write_rows(folder, 6, start=ROWS, mode="a")
    yield "growth", 12, 23, lambda job: run(job, models=FakeModels())
    yield "retry", 14, 19, lambda job: run(job, RunOptions(retry=parse_retry("length")), FakeModels())
    yield "fresh", 14, 31, lambda job: run(job, RunOptions(fresh=True), FakeModels())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a heartbeat dies too
@pytest.mark.slow
def test_killed_at_every_change_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    for name, tokens, stride, command in commands(tmp_path):
        job, start = chain(tmp_path, tokens), tmp_path / f"before-{name}"
        if output.exists():
            shutil.copytree(output, start)
        whole = chain(tmp_path, tokens, output__path=f"whole-{name}")
        run(whole, models=FakeModels())
        expected = read_quickly(tmp_path / f"whole-{name}", "arrow")
        for at in range(stride // 2, 2000, stride):
            with monkeypatch.context() as patch:
                death = SuddenDeath(patch, at)
                with suppress(Killed):
                    command(job)
            bury(output)
            command(job)
            assert read_quickly(output, "arrow") == expected, f"{name}, change {at}"
            assert not list(output.rglob("journal")), f"{name}, change {at}"
            assert visible(output) == visible(tmp_path / f"whole-{name}")
            if not death.struck:
                break
            shutil.rmtree(output)
            if start.exists():
                shutil.copytree(start, output)
        else:
            pytest.fail("the run does not end")
        assert at > 50


def test_a_full_disk_in_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, ROWS)
    run(chain(tmp_path, output__path="whole"), models=FakeModels())
    expected = read_quickly(tmp_path / "whole", "arrow")
    for at in range(20, 1000, 40):
        with monkeypatch.context() as patch:
            death = SuddenDeath(patch, at, FULL_DISK)
            with suppress(OSError):
                run(chain(tmp_path), models=FakeModels())
        bury(tmp_path / "out")
        run(chain(tmp_path), models=FakeModels())
        assert read_quickly(tmp_path / "out", "arrow") == expected, f"change {at}"
        shutil.rmtree(tmp_path / "out")
        if not death.struck:
            return
    pytest.fail("the run does not end")
