"""A week of nights over a growing input: a kill, a deadline, a bad file, a changed template, an overlap.

What stands there on Sunday is what one big run would have made.
"""

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_output, read_quickly, visible
from sudden_death import Killed, SuddenDeath, bury

from batchgen.engine.request import Request
from batchgen.jobs import Job, run
from batchgen.jobs.errors import OutputBusyError, UsageError
from batchgen.jobs.lock import Lock
from batchgen.jobs.status import read_status
from batchgen.jobs.stop import Stop
from batchgen.pipeline.rows import InputError


def deliver(folder: Path, day: str, count: int) -> Path:
    """A day's file: words, one of them null."""
    (folder / "days").mkdir(exist_ok=True)
    words = [None if at == 3 else f"{day} {at}" for at in range(count)]
    path = folder / "days" / f"{day}.parquet"
    pq.write_table(pa.table({"word": pa.array(words, pa.string()), "size": list(range(count))}), path, row_group_size=8)
    return path


def nightly(folder: Path, **changes: Any) -> Job:
    return make_job(folder, input__path="days/*.parquet", **changes)


def night(job: Job, until: int | None = None) -> tuple[int, FakeModels]:
    """A run that a deadline ends when it comes to the row `until`."""
    stop = Stop(datetime.now() + timedelta(days=1))

    def expire(request: Request) -> None:
        if request.key == until:
            stop._deadline = datetime.now()

    models = FakeModels(FakeEngine(expire, seconds=0.002))
    return run(job, models=models, stop=stop).exit_code, models


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a heartbeat dies too
def test_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, output = nightly(tmp_path), tmp_path / "out"
    deliver(tmp_path, "1-monday", 30)
    code, monday = night(job)
    assert (code, sorted(monday.fake.asked)) == (0, [at for at in range(30) if at != 3])
    standing = read_output(output)

    deliver(tmp_path, "2-tuesday", 25)
    with monkeypatch.context() as patch, suppress(Killed):
        death = SuddenDeath(patch, 40)
        night(job)
    assert death.struck
    bury(output)
    assert read_output(output) == standing
    assert read_status(output).state == "killed"

    deliver(tmp_path, "3-wednesday", 800)
    code, wednesday = night(job, until=200)
    assert code == 4
    assert not set(wednesday.fake.asked) & set(range(30))
    assert read_output(output) == standing
    known = read_status(output)
    assert 30 < known.done < known.rows == 855

    thursday = deliver(tmp_path, "4-thursday", 20)
    whole = thursday.read_bytes()
    thursday.write_bytes(whole[:-20])
    with pytest.raises(InputError, match=r"4-thursday\.parquet"):
        night(job)
    assert read_output(output) == standing
    assert read_status(output).done == known.done

    thursday.write_bytes(whole)
    with pytest.raises(UsageError, match="belongs to a different job"):
        night(nightly(tmp_path, prompt__text="Shout {{ word }}"))
    assert read_output(output) == standing

    with Lock(output / "__batchgen__" / "lock.json"), pytest.raises(OutputBusyError):
        night(nightly(tmp_path))
    code, saturday = night(nightly(tmp_path))
    assert code == 0
    assert not set(saturday.fake.asked) & set(monday.fake.asked + wednesday.fake.asked)
    assert len(saturday.fake.asked) > 100

    code, sunday = night(nightly(tmp_path))
    assert (code, sunday.loads) == (0, 0)

    big = nightly(tmp_path, output__path="big")
    assert night(big)[0] == 0
    assert read_quickly(output, "arrow") == read_quickly(tmp_path / "big", "arrow")
    assert read_output(output) == read_output(tmp_path / "big")
    assert visible(output) == visible(tmp_path / "big")
    assert manifest(output)["counts"] == manifest(tmp_path / "big")["counts"]
    assert manifest(output)["counts"]["error"] == 4  # the null of each day


def dump(folder: Path, name: str, identities: range) -> None:
    (folder / "days").mkdir(exist_ok=True)
    table = pa.table({"id": list(identities), "word": [f"word {at}" for at in identities]})
    pq.write_table(table, folder / "days" / f"{name}.parquet", row_group_size=8)


def test_rows_that_come_again_with_a_later_delivery_are_passed_over(tmp_path: Path) -> None:
    """Each night's file is a dump of everything; only what has a new id is asked and comes into the output."""
    job = nightly(tmp_path, input__id="id")
    dump(tmp_path, "1", range(30))
    assert night(job)[0] == 0
    dump(tmp_path, "2", range(10, 50))
    code, second = night(job)
    assert code == 0
    assert sorted(second.fake.asked) == [at for at in range(30, 70) if at >= 50]  # positions: ids 30 to 49
    rows = read_output(tmp_path / "out")
    assert [row["id"] for row in rows] == list(range(50))
    assert manifest(tmp_path / "out")["counts"]["skipped"] == 20
    assert manifest(tmp_path / "out")["skipped"] == list(range(30, 50))
    code, third = night(job)
    assert (code, third.loads) == (0, 0)
    dump(tmp_path, "3", range(50))
    code, fourth = night(job)
    assert (code, fourth.loads) == (0, 0)
    assert read_output(tmp_path / "out") == rows


def test_a_repeated_row_stays_passed_over_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = nightly(tmp_path, input__id="id")
    dump(tmp_path, "1", range(20))
    assert night(job)[0] == 0
    dump(tmp_path, "2", range(25))
    for at in range(4, 40, 3):
        with monkeypatch.context() as patch, suppress(Killed):
            SuddenDeath(patch, at)
            night(job)
        bury(tmp_path / "out")
    assert night(job)[0] == 0
    assert [row["id"] for row in read_output(tmp_path / "out")] == list(range(25))


def test_one_delivery_must_not_repeat_itself(tmp_path: Path) -> None:
    job = nightly(tmp_path, input__id="id")
    dump(tmp_path, "1", range(5))
    assert night(job)[0] == 0
    dump(tmp_path, "2", range(5, 8))
    dump(tmp_path, "3", range(7, 9))
    with pytest.raises(InputError, match=r"holds 7 twice: days/2\.parquet row 3, days/3\.parquet row 1") as caught:
        night(job)
    assert caught.value.exit_code == 2
