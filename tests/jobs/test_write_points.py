"""Every place where a run writes is known, counted by the tests that kill it there, and survives a full disk."""

import errno
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_models import FakeModels
from job_files import make_job, read_output, visible, write_job, write_rows
from sudden_death import SuddenDeath

from batchgen.jobs import run
from batchgen.jobs.cli import invoke
from batchgen.pipeline import sink
from batchgen.pipeline.place import create_file

ROWS = 20
CHANGES = {"os.rename": ("replace", "rename"), "os.remove": ("unlink",), "os.rmdir": ("rmdir",), "os.mkdir": ("mkdir",),
           "os.link": ("link",), "os.truncate": (), "os.symlink": (), "os.chmod": ()}  # fmt: skip

# Files that a run opens for writing. One that is missing here is a write point that no kill test has been thought of
# for: what it loses when a kill leaves it half written has to be answered first.
WRITTEN = {
    "lock.guard": "empty; the kernel's lock on it goes with the process",
    "lock.json": "aside, renamed",
    "job.yaml": "aside, renamed",
    "manifest.json": "aside, renamed",
    "commit.json": "aside, renamed",
    "N-X.arrow": "a journal segment: aside, renamed, with its checksum in the name",
    "log.jsonl": "appended; a line that was cut is left out when it is read",
    "N.tokens": "scratch, made anew by the next run",
    "N.errors": "scratch, made anew by the next run",
    "dataset_info.json": "staging, renamed by the commit",
    "state.json": "staging, renamed by the commit",
    "data.jsonl": "staging, renamed by the commit",
}


class Watch:
    """What Python does to the file system below a directory, as the interpreter itself reports it."""

    def __init__(self) -> None:
        self.root = ""
        self.changes: list[str] = []
        self.opened: set[str] = set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.root or not arguments or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.fspath(arguments[0])
        if event in CHANGES and (str(path).startswith(self.root) or (event == "os.mkdir" and self.root in str(path))):
            self.changes.append(event)
        elif event == "open" and str(path).startswith(self.root) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self.opened.add(_kind(Path(str(path)).name))


def _kind(name: str) -> str:
    """A file name without what differs from run to run."""
    name = re.sub(r"\.\d+\.part$", "", name)
    name = re.sub(r"^\d{6}-[0-9a-f]{8}\.", "N-X.", name)
    return re.sub(r"^\d+\.", "N.", name)


WATCH = Watch()


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_every_write_point_is_known_and_counted(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, ROWS)
    job = make_job(tmp_path, output__format=form, run__checkpoint_seconds=60)
    WATCH.changes, WATCH.opened = [], set()
    with monkeypatch.context() as patch:
        death = SuddenDeath(patch, at=10**9)
        WATCH.root = str(tmp_path / "out")
        try:
            run(job, models=FakeModels())
        finally:
            WATCH.root = ""
    assert len(WATCH.changes) > 20
    assert len(WATCH.changes) <= death.count, "a change of the file system that no kill test strikes"
    assert {event for event in WATCH.changes if not CHANGES[event]} == set()
    assert WATCH.opened - set(WRITTEN) == {name for name in WATCH.opened if name.startswith("data-")}


class FullDisk(io.RawIOBase):
    """A file on a disk that has room for `room` bytes more, over all of its files."""

    room = 0

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if type(self).room < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        type(self).room -= size
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def create_on_a_full_disk(path: Path) -> pa.NativeFile:
    """A final file on the full disk; the trial that comes before a model is loaded has its own."""
    return pa.PythonFile(FullDisk(path), mode="w") if "staging" in path.parts else create_file(path)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize("room", [0, 200, 6000])
def test_a_disk_that_fills_up_while_final_files_are_written(
    tmp_path: Path, form: str, room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path, ROWS)
    job = make_job(tmp_path, output__format=form)
    run(job, models=FakeModels())
    earlier, names = read_output(tmp_path / "out", form), visible(tmp_path / "out")
    write_rows(tmp_path, 9, start=ROWS, mode="a")
    with monkeypatch.context() as patch:
        FullDisk.room = room
        patch.setattr(sink, "create_file", create_on_a_full_disk)
        with pytest.raises(OSError) as caught:
            run(job, models=FakeModels())
    assert caught.value.errno == errno.ENOSPC
    assert visible(tmp_path / "out") == names
    assert read_output(tmp_path / "out", form) == earlier
    models = FakeModels()
    assert run(job, models=models).asked == 0  # what was generated stands in the journal
    assert len(read_output(tmp_path / "out", form)) == ROWS + 9


def test_a_full_disk_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path, 3)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "out"))

    monkeypatch.setattr("batchgen.jobs.command_run.run", full)
    assert invoke(["run", str(write_job(tmp_path))]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "the disk is full; finished rows are kept" in line
