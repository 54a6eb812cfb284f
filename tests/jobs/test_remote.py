"""Inputs and outputs behind fsspec: the same rows and the same promises in memory and in an S3 server."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_models import FakeModels
from job_files import make_job, read_output, write_job, write_rows
from object_store import bury_remote, clear_memory, read_remote, s3_server, visible_remote
from sudden_death import Killed

from batchgen.jobs import Job, run
from batchgen.jobs.cli import cli, invoke
from batchgen.jobs.errors import JobError, OutputBusyError, UsageError
from batchgen.jobs.lock import Lock, read_holder
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.status import read_status
from batchgen.pipeline.place import PlaceError, RemotePath, place

ROWS = 20
FORMATS = ("arrow", "parquet", "jsonl")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty prefix of a store."""
    clear_memory()
    if request.param == "s3":
        request.getfixturevalue("s3")
    yield f"{request.param}://lake/{request.node.name.replace('[', '-').replace(']', '')}"
    clear_memory()


def remote(path: str) -> RemotePath:
    found = place(path, Path())
    assert isinstance(found, RemotePath)
    return found


def upload(local: Path, url: str) -> None:
    remote(url).write_bytes(local.read_bytes())


def remote_job(folder: Path, root: str, **overrides: Any) -> Job:
    settings = {"input__path": f"{root}/in/*.jsonl", "output__path": f"{root}/out", "run__checkpoint_seconds": 60}
    return make_job(folder, **{**settings, **overrides})


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_on_a_store_equals_one_on_the_local_disk(
    tmp_path: Path, root: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    upload(write_rows(tmp_path, ROWS), f"{root}/in/rows.jsonl")
    report = run(remote_job(tmp_path, root, output__format=form), models=FakeModels())
    assert report.exit_code == 0
    output = remote(f"{root}/out")
    run(make_job(tmp_path, output__format=form, output__path="whole"), models=FakeModels())
    assert read_remote(output, form) == read_output(tmp_path / "whole", form)
    status = read_status(output)
    assert (status.state, status.alive, status.done) == ("finished", False, ROWS)
    assert sorted(path.name for path in (output / "__batchgen__").iterdir()) == [
        "job.yaml",
        "log.jsonl",
        "manifest.json",
    ]
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "rows.jsonl", "scratch", "whole"]
    models = FakeModels()
    assert run(remote_job(tmp_path, root, output__format=form), models=models).exit_code == 0
    assert models.loads == 0


def test_growth_and_change_of_remote_inputs(tmp_path: Path, root: str) -> None:
    rows = write_rows(tmp_path, ROWS)
    upload(rows, f"{root}/in/rows.jsonl")
    run(remote_job(tmp_path, root), models=FakeModels())
    upload(write_rows(tmp_path, 3, start=ROWS, mode="a"), f"{root}/in/rows.jsonl")
    upload(write_rows(tmp_path, 2, start=40, name="more.jsonl"), f"{root}/in/more.jsonl")
    report = run(remote_job(tmp_path, root), models=FakeModels())
    assert report.asked == 5
    numbers = [row["nested"]["list"][0] for row in read_remote(remote(f"{root}/out"))]
    assert numbers == [*range(ROWS + 3), 40, 41]
    upload(write_rows(tmp_path, ROWS + 3, start=1), f"{root}/in/rows.jsonl")
    with pytest.raises(Exception, match=r"rows\.jsonl: changed since this job began"):
        run(remote_job(tmp_path, root), models=FakeModels())
    remote(f"{root}/in/rows.jsonl").unlink()
    with pytest.raises(Exception, match=r"rows\.jsonl: belongs to this job's input and is gone"):
        run(remote_job(tmp_path, root), models=FakeModels())


def test_the_identity_of_an_object_is_its_etag(tmp_path: Path, s3: str) -> None:
    rows = write_rows(tmp_path, 5)
    upload(rows, "s3://lake/etag/in/rows.jsonl")
    run(remote_job(tmp_path, "s3://lake/etag"), models=FakeModels())
    upload(rows, "s3://lake/etag/in/rows.jsonl")  # newer, and the same
    assert run(remote_job(tmp_path, "s3://lake/etag"), models=FakeModels()).asked == 0
    stored = json.loads(remote("s3://lake/etag/out/__batchgen__/manifest.json").read_bytes())
    assert stored["input"][0]["version"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "jsonl.gz"])
def test_every_input_format_is_read_from_a_store(tmp_path: Path, root: str, suffix: str) -> None:
    import gzip

    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    table = pa.table({"word": [f"word {at}" for at in range(30)]})
    local = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, local, row_group_size=7)
    elif suffix == "arrow":
        with pa.ipc.new_stream(str(local), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    elif suffix == "csv":
        pyarrow.csv.write_csv(table, local)
    else:
        local.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist())))
    upload(local, f"{root}/in/{local.name}")
    job = remote_job(tmp_path, root, input__path=f"{root}/in")
    assert run(job, models=FakeModels()).exit_code == 0
    assert [row["word"] for row in read_remote(remote(f"{root}/out"))] == table["word"].to_pylist()


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, 5)
    job = make_job(tmp_path, input__path=f"file://{rows}", output__path=f"file://{tmp_path}/out")
    run(job, models=FakeModels())
    assert len(read_output(tmp_path / "out")) == 5


def test_two_live_runs_are_kept_apart(root: str) -> None:
    path = remote(f"{root}/out") / "__batchgen__" / "lock.json"
    with Lock(path):
        assert read_holder(path) is not None
        with pytest.raises(OutputBusyError, match="another run holds this output"):
            Lock(path)
    assert read_holder(path) is None


def test_of_two_that_take_over_one_wins(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = remote(f"{root}/out")
    path = output / "__batchgen__" / "lock.json"
    dead = Lock(path)
    bury_remote(output)
    holder = read_holder(path)
    winner = Lock(path)
    monkeypatch.setattr("batchgen.jobs.lock._newest", lambda path: (1, holder))  # what the slower one saw
    with pytest.raises(OutputBusyError):
        Lock(path)
    monkeypatch.undo()
    winner.check()
    with pytest.raises(JobError, match="another run took over this output"):
        dead.check()
    dead.release()
    winner.check()
    winner.release()


def test_a_store_that_grants_a_name_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_memory()
    monkeypatch.setattr(RemotePath, "create", RemotePath.write_bytes)
    with pytest.raises(JobError, match="two runs could not be kept apart"):
        Lock(remote("memory://lake/out/__batchgen__/lock.json"))


class StoreDeath:
    """Counts what is put, copied and removed in stores; number `at` and all later ones do not happen.

    Of those counted, `kinds` tells each by name and file. With `error` set, number `at` alone fails.
    """

    NAMES = ("write_bytes", "create", "copy_to", "unlink", "open")

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: Exception | None = None) -> None:
        self.kinds: list[tuple[str, str]] = []
        self.struck = False
        for name in self.NAMES:
            patch.setattr(RemotePath, name, self._guard(name, getattr(RemotePath, name), at, error))

    def _guard(self, name: str, function: Any, at: int, error: Exception | None) -> Any:
        def guarded(path: RemotePath, *arguments: Any, **options: Any) -> Any:
            if name == "open" and arguments[:1] != ("wb",):
                return function(path, *arguments, **options)
            self.kinds.append((name, path.name))
            if error is not None and len(self.kinds) == at:
                self.struck = True
                raise error
            if error is None and len(self.kinds) >= at:
                self.struck = True
                raise Killed
            return function(path, *arguments, **options)

        return guarded


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a heartbeat dies too
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_killed_at_every_change_of_the_store(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, ROWS)
    job = make_job(tmp_path, output__path="memory://lake/out", output__format=form, run__checkpoint_seconds=60)
    output = remote("memory://lake/out")
    clear_memory()
    run(job, models=FakeModels())
    whole, names = read_remote(output, form), visible_remote(output)
    retry = RunOptions(retry=parse_retry("length,errors"))
    for options in (RunOptions(), retry):
        for at in range(1, 300):
            clear_memory()
            if options.retry:
                run(job, models=FakeModels())
            with monkeypatch.context() as patch:
                death = StoreDeath(patch, at)
                with suppress(Killed):
                    run(job, options, models=FakeModels())
            bury_remote(output)
            committing = (output / "__batchgen__" / "commit.json").exists()
            assert committing or visible_remote(output) in ([], names), f"change {at}"
            run(job, models=FakeModels())
            assert read_remote(output, form) == whole, f"change {at}"
            assert visible_remote(output) == names
            assert not (output / "__batchgen__" / "journal").exists()
            if not death.struck:
                break
        assert 10 < at < 299
        assert {name for name, _ in death.kinds} == set(StoreDeath.NAMES)


def test_a_store_that_fails_once_at_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, ROWS)
    job = make_job(tmp_path, output__path="memory://lake/out", run__checkpoint_seconds=60)
    output = remote("memory://lake/out")
    for at in range(1, 300):
        clear_memory()
        with monkeypatch.context() as patch:
            death = StoreDeath(patch, at, PlaceError("memory://lake: the store refuses: no"))
            failed = False
            try:
                run(job, models=FakeModels())
            except PlaceError:
                failed = True
        assert failed or not death.struck or len(read_remote(output)) == ROWS
        bury_remote(output)
        run(job, models=FakeModels())
        assert len(read_remote(output)) == ROWS
        if not death.struck:
            return
    pytest.fail("the run does not end")


def test_errors_are_one_line_with_the_cure(tmp_path: Path, s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 3)

    def error(**overrides: Any) -> str:
        assert invoke(["check", str(write_job(tmp_path, **overrides))]) in (1, 2)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    assert "foo://x/y: foo:// is not a file system that is known here" in error(input__path="foo://x/y")
    assert "foo://x/y: foo:// is not a file system that is known here" in error(output__path="foo://x/y")
    assert "pip install gcsfs" in error(input__path="gs://x/y.jsonl")
    assert "s3://nowhere/a.jsonl does not exist" in error(input__path="s3://nowhere/a.jsonl")
    assert "s3://lake/*.jsonl matches no file" in error(input__path="s3://lake/*.jsonl")


def test_a_missing_bucket_and_missing_credentials(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    write_rows(tmp_path, 3)
    with pytest.raises(PlaceError, match=r"s3://nowhere/out.*bucket above it does not exist; create it first"):
        run(make_job(tmp_path, output__path="s3://nowhere/out"), models=FakeModels())
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(PlaceError, match=r"s3://lake/out.*no credentials.*AWS_ACCESS_KEY_ID"):
        run(make_job(tmp_path, output__path="s3://lake/out"), models=FakeModels())
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize("name", ["[x]*?", "a[b", "[!a] ü", "{a,b}"])
def test_signs_of_patterns_in_the_name_of_an_output(tmp_path: Path, root: str, name: str) -> None:
    write_rows(tmp_path, 3)
    job = make_job(tmp_path, output__path=f"{root}/{name}/out", output__format="parquet")
    assert run(job, models=FakeModels()).exit_code == 0
    assert run(job, models=FakeModels()).exit_code == 0
    assert read_status(remote(f"{root}/{name}/out")).done == 3


def test_a_path_is_named_as_it_is_written() -> None:
    pytest.importorskip("aiohttp")
    for path in ("memory://a/b", "http://127.0.0.1:9/rows.jsonl", "https://host/rows.jsonl"):
        assert (str(place(path, Path())), str(place(path, Path()).parent / "x")) == (
            path,
            path.rpartition("/")[0] + "/x",
        )


def test_an_uninstalled_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(PlaceError, match=r"pip install batchgen\[s3\]"):
        place("s3://lake/x", Path())


def test_a_remote_output_apart_from_its_input(tmp_path: Path, root: str) -> None:
    upload(write_rows(tmp_path, 3), f"{root}/in/rows.jsonl")
    for overrides in (
        {"input__path": f"{root}/in", "output__path": f"{root}/in/out"},
        {"input__path": f"{root}/**/*.jsonl", "output__format": "jsonl"},
        {"input__path": f"{root}/in/rows.jsonl", "output__path": f"{root}/in"},
    ):
        with pytest.raises(UsageError):
            run(remote_job(tmp_path, root, **overrides), models=FakeModels())


def test_status_on_the_command_line(tmp_path: Path) -> None:
    clear_memory()
    write_rows(tmp_path, 3)
    run(make_job(tmp_path, output__path="memory://lake/out"), models=FakeModels())
    result = CliRunner().invoke(cli, ["status", "memory://lake/out"], obj={})
    assert result.output.startswith("memory://lake/out: job job, finished")
