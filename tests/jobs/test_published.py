"""What was published stays: whatever the journal still holds, a later run finds wrong, or the input has become."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_quickly, visible, write_rows
from sudden_death import SuddenDeath, bury

from batchgen.engine.request import Completion, Request, RowError
from batchgen.jobs import Job, run
from batchgen.jobs.errors import JobError, UsageError
from batchgen.jobs.journal import Journal
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.status import read_status
from batchgen.pipeline import source
from batchgen.pipeline.rows import InputError

RETRY = RunOptions(retry=parse_retry("errors"))


class Gone(BaseException):
    """The process ends here."""


class Flaky(FakeEngine):
    """Row 3 fails, in a way that another time it may not."""

    def _complete(self, request: Request) -> Completion:
        error = RowError("engine", "generate", "out of memory", True)
        completion = super()._complete(request)
        return replace(completion, samples=(), error=error) if request.key == 3 else completion


def broken_off(job: Job, rows: int = 12) -> None:
    """A run that answers some rows, row 3 with an error, and then fails for good."""
    seen: list[int] = []

    def before(request: Request) -> None:
        seen.append(request.key)
        if len(seen) > rows:
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError):
        run(job, models=FakeModels(Flaky(before=before, seconds=0.03)))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_quickly(folder / "out", "arrow")


def test_no_segment_left_behind_brings_an_earlier_outcome_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, 20)
    job = make_job(tmp_path)
    broken_off(job)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "forget_rows_below", lambda *_: (_ for _ in ()).throw(Gone()))
        with pytest.raises(Gone):
            run(job, RETRY, FakeModels())
    published = rows_of(tmp_path)
    assert published[3]["error"] is None
    output = tmp_path / "out"
    output.rename(tmp_path / "kept")
    names = sorted(path.name for path in (tmp_path / "kept" / "__batchgen__" / "journal").iterdir())
    assert len(names) > 1
    for left in names:
        shutil.copytree(tmp_path / "kept", output)
        for name in names:
            if name != left:
                (output / "__batchgen__" / "journal" / name).unlink()
        status = read_status(output)
        assert (status.counts, status.tokens) == (manifest(output)["counts"], manifest(output)["tokens"])
        models = FakeModels()
        run(job, models=models)
        assert (rows_of(tmp_path), models.loads) == (published, 0)
        assert not (output / "__batchgen__" / "journal").exists()
        shutil.rmtree(output)


def test_rows_journaled_after_a_publication_count(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    job = make_job(tmp_path)
    for night in range(1, 4):
        run(job, models=FakeModels())
        write_rows(tmp_path, 20, start=20 * night, mode="a")
        broken_off(job)
        done = read_status(tmp_path / "out").done
        assert done > 20 * night
        models = FakeModels()
        run(job, models=models)
        assert len(models.fake.asked) <= 20 * (night + 1) - done
        assert len(rows_of(tmp_path)) == 20 * (night + 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a heartbeat dies too
@pytest.mark.slow
def test_a_retry_before_publishing_killed_at_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, 16)
    job = make_job(tmp_path, run__checkpoint_seconds=0.01)
    broken_off(job)
    (tmp_path / "out").rename(tmp_path / "before")
    whole = make_job(tmp_path, output__path="whole")
    run(whole, models=FakeModels())
    expected = read_quickly(tmp_path / "whole", "arrow")
    for at in range(1, 1000, 2):
        shutil.copytree(tmp_path / "before", tmp_path / "out")
        with monkeypatch.context() as patch:
            death = SuddenDeath(patch, at)
            try:
                run(job, RETRY, FakeModels())
            except BaseException:
                assert death.struck
        bury(tmp_path / "out")
        seen = what_is_there(tmp_path / "out")
        assert seen in (None, expected) or commit_pending(tmp_path)
        run(job, models=FakeModels())
        after = rows_of(tmp_path)
        assert after[3]["error"] is None or seen is None, f"change {at}"
        run(job, RETRY, FakeModels())
        assert rows_of(tmp_path) == expected, f"change {at}"
        shutil.rmtree(tmp_path / "out")
        if not death.struck:
            return
    pytest.fail("the run does not end")


def what_is_there(output: Path) -> Any:
    names = [name for name in visible(output) if name.startswith("data")]
    return read_quickly(output, "arrow") if names and (output / "state.json").exists() else None


def commit_pending(folder: Path) -> bool:
    return (folder / "out" / "__batchgen__" / "commit.json").exists()


class TestRefusedRerun:
    """A run that cannot begin changes nothing in a finished output, in particular not what it says of itself."""

    def check_unchanged(self, folder: Path, before: dict[str, Any], modified: dict[str, int]) -> None:
        after = manifest(folder / "out")
        assert [after[key] for key in ("state", "counts", "num_rows")] == [
            before[key] for key in ("state", "counts", "num_rows")
        ]
        models = FakeModels()
        run(make_job(folder), models=models)
        assert models.loads == 0
        assert {path.name: path.stat().st_mtime_ns for path in (folder / "out").glob("*.*")} == modified

    def finished(self, folder: Path) -> tuple[Job, dict[str, Any], dict[str, int]]:
        write_rows(folder, 20)
        job = make_job(folder)
        run(job, models=FakeModels())
        return job, manifest(folder / "out"), {
            path.name: path.stat().st_mtime_ns for path in (folder / "out").glob("*.*")
        }  # fmt: skip

    def test_input_that_changed(self, tmp_path: Path) -> None:
        job, before, modified = self.finished(tmp_path)
        path = tmp_path / "rows.jsonl"
        shutil.copy2(path, tmp_path / "kept")
        path.write_text('{"word": "other"}\n')
        with pytest.raises(InputError, match="changed since this job began"):
            run(job, models=FakeModels())
        (tmp_path / "kept").rename(path)
        self.check_unchanged(tmp_path, before, modified)

    def test_a_signal_while_the_input_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job, before, modified = self.finished(tmp_path)
        arrange = source.arrange
        with monkeypatch.context() as patch:
            patch.setattr(source, "arrange", lambda *given: (signal.raise_signal(signal.SIGINT), arrange(*given))[1])
            report = run(job, models=FakeModels())
        assert (report.exit_code, report.counts) == (130, before["counts"])
        self.check_unchanged(tmp_path, before, modified)

    def test_a_retry_whose_model_does_not_load(self, tmp_path: Path) -> None:
        class Unloadable(FakeModels):
            def engine(self, job: Job) -> Any:
                raise RuntimeError("no such device")

        job, before, modified = self.finished(tmp_path)
        with pytest.raises(RuntimeError):
            run(job, RETRY, Unloadable())
        self.check_unchanged(tmp_path, before, modified)

    def test_a_retry_that_answers_nothing(self, tmp_path: Path) -> None:
        job, before, modified = self.finished(tmp_path)

        def before_first(_: Request) -> None:
            raise RuntimeError("gone")

        with pytest.raises(RuntimeError):
            run(job, RunOptions(retry=parse_retry("length")), FakeModels(FakeEngine(before_first)))
        self.check_unchanged(tmp_path, before, modified)


def write_ids(folder: Path, *ids: Any) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        for value in ids:
            file.write(json.dumps({"word": f"word {value}", "id": value}) + "\n")


class TestTypesOfAGrowingInput:
    @pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
    def test_published_rows_stay_whatever_the_majority(self, tmp_path: Path, form: str) -> None:
        write_ids(tmp_path, 0, 1, 2)
        job = make_job(tmp_path, output__format=form)
        run(job, models=FakeModels())
        before = read_quickly(tmp_path / "out", form)
        write_ids(tmp_path, "a", "b", "c", "d", 7)
        models = FakeModels()
        report = run(job, models=models)
        after = read_quickly(tmp_path / "out", form)
        assert after[:3] == before
        assert [row["error"] and row["error"]["code"] for row in after[3:]] == ["bad_row"] * 4 + [None]
        assert (report.counts["error"], models.fake.asked) == (4, [7])
        assert run(job, models=FakeModels()).asked == 0

    def test_a_column_that_comes_later(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"word": "a"}\n')
        job = make_job(tmp_path)
        run(job, models=FakeModels())
        write_ids(tmp_path, 5)
        run(job, models=FakeModels())
        assert [row["id"] for row in rows_of(tmp_path)] == [None, 5]

    def test_a_column_nobody_uses_spoils_no_row(self, tmp_path: Path) -> None:
        write_ids(tmp_path, 0, 1, "x")
        report = run(make_job(tmp_path, output__columns=["word"]), models=FakeModels())
        assert report.counts["error"] == 0

    def test_the_first_rows_alone_settle_nothing(self, tmp_path: Path) -> None:
        write_ids(tmp_path, 1, 2, 0.5)
        job = make_job(tmp_path)
        run(job.with_limit(2), models=FakeModels())
        assert run(job, models=FakeModels()).counts["error"] == 0
        assert [row["id"] for row in rows_of(tmp_path)] == [1.0, 2.0, 0.5]

    def test_an_answer_is_never_given_up_for_a_type(self, tmp_path: Path) -> None:
        write_ids(tmp_path, 1, "a", "b", "c")
        job = make_job(tmp_path)
        run(job.with_limit(1), models=FakeModels())
        before = rows_of(tmp_path)
        with pytest.raises(JobError, match=r"line 1: column 'id' is string.*published already.*--fresh"):
            run(job, models=FakeModels())
        assert rows_of(tmp_path) == before


class TestInputDuringTheRun:
    """Carried columns are read again at the end: from the same rows, or not at all."""

    def test_a_rewritten_file_is_noticed(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path, 20)

        def rewrite(request: Request) -> None:
            if request.key == 7:
                path.write_text(path.read_text().replace("word", "w0rd"))

        with pytest.raises(JobError, match=r"rows\.jsonl: changed or gone since this run began"):
            run(make_job(tmp_path), models=FakeModels(FakeEngine(rewrite)))
        assert visible(tmp_path / "out") == []

    def test_lines_appended_meanwhile_wait_for_the_next_run(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 20)

        def append(request: Request) -> None:
            if request.key == 7:
                write_rows(tmp_path, 5, start=20, mode="a")

        job = make_job(tmp_path)
        assert run(job, models=FakeModels(FakeEngine(append))).counts["rows"] == 20
        assert run(job, models=FakeModels()).counts["rows"] == 25
        assert [row["nested"]["list"][0] for row in rows_of(tmp_path)] == list(range(25))


def test_another_run_that_took_over_is_not_disturbed(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    lock = tmp_path / "out" / "__batchgen__" / "lock.json"

    def take_over(request: Request) -> None:
        if request.key == 7:
            lock.write_text(json.dumps({**json.loads(lock.read_text()), "token": "another"}))

    with pytest.raises(JobError, match="another run took over this output"):
        run(make_job(tmp_path, run__checkpoint_seconds=60), models=FakeModels(FakeEngine(take_over)))
    assert visible(tmp_path / "out") == []
    assert list((tmp_path / "out" / "__batchgen__").glob("journal/*")) == []
    assert json.loads(lock.read_text())["token"] == "another"


def test_a_lock_lost_while_publishing_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.jobs import publish

    write_rows(tmp_path, 20)
    write = publish._write_shards
    lock = tmp_path / "out" / "__batchgen__" / "lock.json"

    def take_over(*given: Any) -> Any:
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "token": "another"}))
        return write(*given)

    monkeypatch.setattr(publish, "_write_shards", take_over)
    with pytest.raises(JobError, match="another run took over this output"):
        run(make_job(tmp_path), models=FakeModels())
    assert visible(tmp_path / "out") == []
    assert not commit_pending(tmp_path)


def test_a_usage_error_is_no_job_error_of_another_kind(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    (tmp_path / "file").write_text("")
    models = FakeModels()
    with pytest.raises(UsageError, match=r"run\.metrics_file: file/m\.prom cannot be written"):
        run(make_job(tmp_path, run__metrics_file="file/m.prom"), models=models)
    assert models.loads == 0


def test_a_metrics_file_that_fails_later_ends_no_run(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)

    def replace_folder(request: Request) -> None:
        if request.key == 7:
            shutil.rmtree(tmp_path / "metrics")
            (tmp_path / "metrics").write_text("in the way")

    job = make_job(tmp_path, run__metrics_file="metrics/m.prom")
    assert run(job, models=FakeModels(FakeEngine(replace_folder))).exit_code == 0
    assert len(rows_of(tmp_path)) == 20
    assert '"metrics_failed"' in (tmp_path / "out" / "__batchgen__" / "log.jsonl").read_text()
