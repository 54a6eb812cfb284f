"""`batchgen push` against a Hub on loopback, with the real client: what lands there, and what a busy Hub does to it."""

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from datasets import ClassLabel, Dataset, Features, Image, Value
from fake_hub import TOKEN, FakeHub, Fault, fake_hub
from fake_models import FakeEngine, FakeModels
from job_files import make_job, read_output, write_rows
from openai_files import chat_line, write_lines

from batchgen.jobs import run
from batchgen.jobs.cli import cli
from batchgen.jobs.command_push import PushOptions, push_output
from batchgen.jobs.errors import JobError, UsageError

REPO = "tester/labels"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as running:
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that somebody would have slept."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def finished(folder: Path, rows: int = 20, form: str = "arrow", **more: Any) -> Path:
    write_rows(folder, rows)
    run(make_job(folder, output__format=form, **more), models=FakeModels())
    return folder / "out"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of Arrow; pushing changes nothing in it."""
    return finished(tmp_path_factory.mktemp("job"))


def push(output: Path, **options: Any) -> list[str]:
    return list(push_output(output, REPO, PushOptions(**options)))


def table_of(hub: FakeHub, path: str) -> list[dict[str, Any]]:
    return pq.read_table(io.BytesIO(hub.repos[REPO].files()[path])).to_pylist()


def front_matter(hub: FakeHub) -> tuple[dict[str, Any], str]:
    _, front, body = hub.repos[REPO].files()["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(front), body


def test_an_arrow_output_becomes_parquet_shards_in_one_commit(output: Path, hub: FakeHub) -> None:
    lines = push(output)
    repo = hub.repos[REPO]
    assert repo.messages == ["initial", "batchgen: job, 20 rows"]
    shards = [f"data/train-{at:05d}-of-00003.parquet" for at in range(3)]
    assert sorted(repo.files()) == [".gitattributes", "README.md", *shards]
    assert [row for shard in shards for row in table_of(hub, shard)] == read_output(output)
    assert not repo.private
    assert lines[0].startswith("1 of 3: data/train-00000-of-00003.parquet")
    assert lines[-1] == f"{REPO}: commit {repo.branches['main']}"


def test_load_dataset_reads_it_back_with_its_features(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Features({"word": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"word": ["a", "b"], "label": [0, 1]}, features).save_to_disk(str(tmp_path / "in"))
    run(make_job(tmp_path, input__path="in"), models=FakeModels())
    push(tmp_path / "out")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    loaded = datasets.load_dataset(REPO, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.features["label"] == features["label"]
    assert list(loaded) == read_output(tmp_path / "out")


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_parquet_and_jsonl_go_as_they_are(tmp_path: Path, hub: FakeHub, form: str) -> None:
    output = finished(tmp_path, form=form)
    push(output, split="test", config="small", revision="draft")
    repo = hub.repos[REPO]
    assert sorted(repo.files("main")) == [".gitattributes"]
    files = repo.files("draft")
    local = sorted((output / "data").iterdir()) if form == "parquet" else [output / "data.jsonl"]
    names = [f"small/test-{at:05d}-of-{len(local):05d}.{form}" for at in range(len(local))]
    assert [files[name] for name in names] == [path.read_bytes() for path in local]


def test_a_batch_api_output_goes_with_its_failures(tmp_path: Path, hub: FakeHub) -> None:
    write_lines(tmp_path, [chat_line("a"), chat_line("b", stream=True)])
    settings = {"input__path": "batch.jsonl", "input__format": "openai", "prompt": None}
    engine = FakeEngine()
    engine.tokenizer.chat_template = "{{ messages[0].content }}"
    run(make_job(tmp_path, output__format="openai", **settings), models=FakeModels(engine))
    push(tmp_path / "out")
    files = hub.repos[REPO].files()
    assert files["data/train-00000-of-00001.jsonl"] == (tmp_path / "out" / "output.jsonl").read_bytes()
    assert files["data/errors-train.jsonl"] == (tmp_path / "out" / "errors.jsonl").read_bytes()


def test_an_image_that_is_a_path_here_is_bytes_there(tmp_path: Path, hub: FakeHub) -> None:
    picture = tmp_path / "red.png"
    picture.write_bytes(b"\x89PNG not decoded by anybody")
    features = Features({"word": Value("string"), "image": Image()})
    rows = {"word": ["a"], "image": [{"path": str(picture), "bytes": None}]}
    Dataset(pa.table(rows, features.arrow_schema)).save_to_disk(str(tmp_path / "in"))
    run(make_job(tmp_path, input__path="in"), models=FakeModels())
    push(tmp_path / "out")
    (row,) = table_of(hub, "data/train-00000-of-00001.parquet")
    assert row["image"] == {"bytes": picture.read_bytes(), "path": "red.png"}


def test_the_card_says_what_was_done(tmp_path: Path, hub: FakeHub) -> None:
    output = finished(tmp_path, generation__temperature=0.5, name="labels-of-words", model__revision="v1")
    push(output)
    metadata, body = front_matter(hub)
    assert metadata["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}
    ]
    assert metadata["size_categories"] == ["n<1K"]
    (info,) = metadata["dataset_info"]
    assert info["config_name"] == "default"
    assert [feature["name"] for feature in info["features"]][:3] == ["word", "nested", "completion"]
    for text in ("# labels-of-words", "`fake/model`", "`v1`", "`fake`", "20 (", "Say {{ word }}", "temperature: 0.5"):
        assert text in body
    assert '"word": "word 0"' in body
    assert "2 error" in body


def test_no_value_of_an_environment_variable_is_in_it(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t-value")
    monkeypatch.setenv("STOP", "halt-word")
    settings = {"prompt__text": "Key ${SECRET}: {{ word }}", "generation__stop": ["${STOP}"], "name": "job ${SECRET}"}
    output = finished(tmp_path, **settings)
    monkeypatch.delenv("SECRET")
    monkeypatch.delenv("STOP")
    push(output)
    assert hub.repos[REPO].messages[-1] == "batchgen: job ${SECRET}, 20 rows"
    _, body = front_matter(hub)
    assert "Key ${SECRET}: {{ word }}" in body
    assert "s3cr3t-value" not in body
    assert "halt-word" not in body
    assert TOKEN not in body
    assert str(tmp_path) not in body


def test_a_value_that_an_answer_repeats_is_hidden_too(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", 'wo"rd\n1')
    (tmp_path / "rows.jsonl").write_text('{"word": "is wo\\"rd\\n1!"}\n')
    monkeypatch.setenv("SHORT", "is")
    run(make_job(tmp_path, prompt__text="${SECRET}: {{ word }} ${SHORT}"), models=FakeModels())
    push(tmp_path / "out")
    _, body = front_matter(hub)
    assert '"word": "is ${SECRET}!"' in body


def test_pushed_again_nothing_is_sent_and_nothing_changes(output: Path, hub: FakeHub) -> None:
    push(output)
    commit, uploads = hub.repos[REPO].branches["main"], list(hub.uploads)
    assert len(uploads) == 3
    lines = push(output)
    assert (hub.repos[REPO].branches["main"], hub.uploads) == (commit, uploads)
    assert lines[-1] == f"{REPO}: holds all of this already (commit {commit})"


def test_a_smaller_output_leaves_no_old_shard_and_other_files_stay(tmp_path: Path, output: Path, hub: FakeHub) -> None:
    push(output)
    small = finished(tmp_path, rows=5)
    push(small)
    push(small, split="test")
    names = sorted(hub.repos[REPO].files())
    assert names == [
        ".gitattributes",
        "README.md",
        "data/test-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet",
    ]
    metadata, body = front_matter(hub)
    assert metadata["configs"][0]["data_files"] == [
        {"split": "train", "path": "data/train-*"},
        {"split": "test", "path": "data/test-*"},
    ]
    assert body.count("## Prompt") == 2


def test_what_others_wrote_in_the_card_stays(output: Path, hub: FakeHub) -> None:
    card = b"---\nlicense: mit\nconfigs:\n- config_name: raw\n  data_files: raw/*\n---\n# Mine\n\nPlease cite.\n"
    hub.add_repo(REPO, {"README.md": card, "raw/a.csv": b"a\n1\n"})
    push(output)
    push(output)
    metadata, body = front_matter(hub)
    assert metadata["license"] == "mit"
    assert [config["config_name"] for config in metadata["configs"]] == ["raw", "default"]
    assert body.startswith("# Mine\n\nPlease cite.\n")
    assert body.count("## Prompt") == 1
    assert "raw/a.csv" in hub.repos[REPO].files()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST", "/commit/", 429, {"Retry-After": "17"}),
        Fault("POST", "/commit/", 412),
        Fault("POST", "/commit/", 409),
        Fault("POST", "/commit/", 503, times=3),
        Fault("POST", "/objects/batch", 429, {"Retry-After": "17"}),
        Fault("PUT", "/lfs-storage/", 503),
        Fault("PUT", "/lfs-storage/", drop=True),
        Fault("PUT", "/lfs-storage/", drop=True, times=7),
        Fault("POST", "/repos/create", 500),
        Fault("POST", "/commit/", drop=True),
    ],
    ids=lambda fault: f"{fault.path}-{'drop' if fault.drop else fault.status}-{fault.times}",
)
def test_a_busy_hub_is_waited_for(output: Path, hub: FakeHub, waits: list[float], fault: Fault) -> None:
    hub.faults.append(fault)
    waits.clear()
    push(output)
    assert fault.times == 0
    assert hub.repos[REPO].messages == ["initial", "batchgen: job, 20 rows"]
    assert len(hub.uploads) == 3
    assert len(waits) > 0
    if "Retry-After" in fault.headers:
        assert 17 <= waits[0] <= 18


def test_the_waiting_has_an_end_and_the_same_command_goes_on(output: Path, hub: FakeHub, waits: list[float]) -> None:
    hub.faults.append(Fault("POST", "/commit/", 503, {"Retry-After": "100000"}, times=10**6))
    waits.clear()
    with pytest.raises(JobError, match=r"the Hub answers 503 .*; give the same command again") as caught:
        push(output)
    assert caught.value.exit_code == 1
    assert len(waits) < 20
    assert max(waits) <= 300
    assert len(hub.uploads) == 3
    hub.faults.clear()
    push(output)
    assert len(hub.uploads) == 3
    assert hub.repos[REPO].messages == ["initial", "batchgen: job, 20 rows"]


def test_private_is_private(output: Path, hub: FakeHub) -> None:
    push(output, private=True)
    assert hub.repos[REPO].private
    hub.repos[REPO].private = False
    with pytest.raises(UsageError, match="exists and is public"):
        push(output, private=True)


def test_an_output_that_is_not_finished_is_refused(tmp_path: Path, hub: FakeHub) -> None:
    write_rows(tmp_path, 20)
    seen: list[int] = []

    def before(request: Any) -> None:
        seen.append(request.key)
        if len(seen) > 8:
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError):
        run(make_job(tmp_path), models=FakeModels(FakeEngine(before=before)))
    with pytest.raises(UsageError, match="rows left; only a finished output can be pushed") as caught:
        push(tmp_path / "out")
    assert caught.value.exit_code == 2
    assert hub.requests == []
    with pytest.raises(UsageError, match="no output of batchgen is here"):
        push(tmp_path)


def test_a_dry_run_shows_everything_and_asks_nobody(output: Path, hub: FakeHub) -> None:
    result = CliRunner().invoke(cli, ["push", str(output), REPO, "--dry-run", "--private"], obj={})
    assert result.exit_code == 0, result.output
    assert f"would send to {REPO} (private" in result.output
    assert "data/train-00002-of-00003.parquet" in result.output
    assert "config_name: default" in result.output
    assert hub.requests == []


@pytest.mark.parametrize(
    ("repo", "options", "message"),
    [
        *(
            (name, {}, "must be the id of a data set repository")
            for name in ("labels", "o/n.git", "o/a--b", "o/a..b", "o/-a", "o/a.", "o/" + "a" * 97)
        ),
        (REPO, {"split": "../up"}, "--split: must be a word"),
        (REPO, {"config": "a/b"}, "--config: must be a word"),
    ],
)
def test_names_that_are_none(output: Path, repo: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(push_output(output, repo, PushOptions(**options)))


def test_an_output_in_a_store_is_refused_with_the_cure() -> None:
    result = CliRunner().invoke(cli, ["push", "memory://lake/out", REPO], obj={})
    assert isinstance(result.exception, UsageError)
    assert "copy it to this machine and push the copy" in str(result.exception)


def test_without_a_token_nothing_is_asked(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub(monkeypatch, token=None) as hub:
        with pytest.raises(UsageError, match="no Hub token; set HF_TOKEN"):
            push(output)
        assert hub.requests == []


def test_a_token_without_rights(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        fake_hub(monkeypatch, token="hf_other"),
        pytest.raises(UsageError, match="the Hub refuses the token; it needs the right to write"),
    ):
        push(output)
