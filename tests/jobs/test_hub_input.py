"""Data sets on the Hub as input, from a Hub on loopback with the real client: files, commits, splits and errors."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import FakeHub, Fault, StoredFile, fake_hub
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_output
from pydantic import ValidationError
from reading import rows_of, source_of

from batchgen.engine.request import Request
from batchgen.jobs import Job, run
from batchgen.jobs.check import check_job
from batchgen.jobs.command_push import PushOptions, push_output
from batchgen.jobs.errors import UsageError
from batchgen.jobs.status import read_status
from batchgen.pipeline.config import InputSettings
from batchgen.pipeline.rows import InputError

PATH = "hf://datasets/org/name"


def parquet(words: list[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"word": words}), sink, row_group_size=2)
    return sink.getvalue()


def arrow(words: list[str]) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"word": words})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as running:
        running.add_repo(
            "org/name",
            {
                "data/train-00000-of-00002.parquet": parquet(["a", "b", "c"]),
                "data/train-00001-of-00002.parquet": parquet(["d", "e"]),
                "data/test-00000-of-00001.parquet": parquet(["t"]),
            },
        )
        yield running


def words(source: Any) -> list[str]:
    return [row["word"] for row in rows_of(source)]


def job_of(folder: Path, **more: Any) -> Job:
    return make_job(folder, **{"input__path": PATH, **more})


def test_a_split_is_read_in_the_order_of_its_files(tmp_path: Path, hub: FakeHub) -> None:
    source = source_of(tmp_path, PATH)
    assert words(source) == ["a", "b", "c", "d", "e"]
    assert source.place(3).endswith("data/train-00001-of-00002.parquet row 1")
    assert words(source_of(tmp_path, PATH, split="test")) == ["t"]
    assert words(source_of(tmp_path, PATH, limit=4)) == ["a", "b", "c", "d"]


def test_configurations_come_from_the_card(tmp_path: Path, hub: FakeHub) -> None:
    configs = b"- config_name: small\n  data_files: s/*.jsonl\n- config_name: big\n  data_files: b/*.csv\n"
    configs += b"- config_name: arrow\n  data_files: a/*.arrow\n"
    card = b"---\nconfigs:\n" + configs + b"---\n"
    files = {
        "README.md": card,
        "s/1.jsonl": b'{"word": "x"}\n',
        "s/2.jsonl": b'{"word": "y"}\n',
        "b/1.csv": b"word\nz\n",
        "a/1.arrow": arrow(["v", "w"]),
    }
    hub.add_repo("org/name", files)
    assert words(source_of(tmp_path, PATH, config="small")) == ["x", "y"]
    assert words(source_of(tmp_path, PATH, config="big")) == ["z"]
    assert words(source_of(tmp_path, PATH, config="arrow")) == ["v", "w"]
    with pytest.raises(InputError, match=r"input.config: .*Config name is missing.*\['small', 'big', 'arrow'\]"):
        source_of(tmp_path, PATH)
    with pytest.raises(InputError, match=r"input.config: .*'huge' not found. Available: \['small', 'big', 'arrow'\]"):
        source_of(tmp_path, PATH, config="huge")


def test_files_of_a_repository_can_be_named(tmp_path: Path, hub: FakeHub) -> None:
    assert words(source_of(tmp_path, f"{PATH}/data/train-*.parquet")) == ["a", "b", "c", "d", "e"]
    assert words(source_of(tmp_path, [f"{PATH}/data/test-00000-of-00001.parquet"])) == ["t"]


def test_a_job_reads_one_commit_however_long_it_takes(tmp_path: Path, hub: FakeHub) -> None:
    first = hub.repos["org/name"].branches["main"]
    seen: list[int] = []

    def before(request: Request) -> None:
        seen.append(request.key)
        if len(seen) > 4:
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError):
        run(job_of(tmp_path), models=FakeModels(FakeEngine(before=before, width=2, seconds=0.05)))
    assert read_status(tmp_path / "out").done > 0
    hub.repos["org/name"].commit(
        "main", {"data/train-00000-of-00001.parquet": StoredFile(parquet(["new"]), True)}, "new"
    )
    run(job_of(tmp_path), models=FakeModels())
    assert [row["word"] for row in read_output(tmp_path / "out")] == ["a", "b", "c", "d", "e"]
    files = manifest(tmp_path / "out")["input"]
    assert {entry["path"].split("@")[1].split("/")[0] for entry in files} == {first}
    assert all(entry["version"] for entry in files)
    run(job_of(tmp_path, output__path="again"), models=FakeModels())
    assert [row["word"] for row in read_output(tmp_path / "again")] == ["new"]


def test_another_revision_in_the_job_is_another_job(tmp_path: Path, hub: FakeHub) -> None:
    repo = hub.repos["org/name"]
    repo.branches["v1"] = repo.branches["main"]
    repo.commit("main", {"train.jsonl": StoredFile(b'{"word": "later"}\n', False)}, "later")
    run(job_of(tmp_path, input__path=f"{PATH}@v1"), models=FakeModels())
    assert len(read_output(tmp_path / "out")) == 5
    with pytest.raises(UsageError, match=r"belongs to a different job .*revision"):
        run(job_of(tmp_path), models=FakeModels())


def test_what_was_pushed_is_read_back(tmp_path: Path, hub: FakeHub) -> None:
    run(job_of(tmp_path), models=FakeModels())
    list(push_output(tmp_path / "out", "tester/labels", PushOptions()))
    rows = rows_of(source_of(tmp_path, "hf://datasets/tester/labels"))
    assert rows == read_output(tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "more", "message", "code"),
    [
        ("hf://datasets/org/none", {}, "hf://datasets/org/none: not found on the Hub, or private; check the name", 2),
        (f"{PATH}@v9", {}, "name@v9: the data set has no revision 'v9'", 2),
        (PATH, {"split": "dev"}, "input.split: .* has no split 'dev', only train, test", 2),
        (f"{PATH}/nothing/*.parquet", {}, "matches no file", 2),
    ],
)
def test_what_is_not_there_is_named_with_the_cure(
    tmp_path: Path, hub: FakeHub, path: str, more: dict[str, Any], message: str, code: int
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        source_of(tmp_path, path, **more)
    assert caught.value.exit_code == code


def test_gated_private_and_out_of_reach(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add_repo("org/gated", {"a.jsonl": b'{"word": "a"}\n'}, gated=True)
    hub.repos["org/name"].private = True
    assert words(source_of(tmp_path, "hf://datasets/org/gated")) == ["a"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InputError, match="is gated; ask for access on its page and set HF_TOKEN"):
        source_of(tmp_path, "hf://datasets/org/gated")
    with pytest.raises(InputError, match="not found on the Hub, or private; check the name, or set HF_TOKEN"):
        source_of(tmp_path, PATH)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"the Hub cannot be reached .*; check the network") as caught:
        source_of(tmp_path, "hf://datasets/org/gated")
    assert caught.value.exit_code == 1


def test_a_busy_hub_is_asked_again(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.faults.append(Fault("GET", "/resolve/", 503, times=2))
    assert len(words(source_of(tmp_path, PATH))) == 5


def test_check_names_the_columns(tmp_path: Path, hub: FakeHub) -> None:
    assert "columns: word" in check_job(job_of(tmp_path), FakeModels())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "hf://org/model"}, "must look like hf://datasets/ORG/NAME"),
        ({"path": "hf://datasets/name"}, "must look like hf://datasets/ORG/NAME"),
        ({"path": "rows.jsonl", "config": "small"}, "only data sets on the Hub have a config"),
    ],
)
def test_paths_that_are_none(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        InputSettings.model_validate(settings)
