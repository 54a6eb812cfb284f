"""A job on a local Ray cluster of two workers: output as on one machine, a worker killed in the middle, resume."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from fake_models import FakeModels
from job_files import make_job, manifest, read_output
from stand_ins import EchoEngine
from tiny import tiny_model

from batchgen.engine.plan import plan
from batchgen.jobs import Job, cli, run
from batchgen.jobs.cluster.models import models_on
from batchgen.jobs.errors import JobError, UsageError
from batchgen.pipeline import annotate
from batchgen.pipeline.ray import Annotate

GROUPS, ROWS = 12, 20

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


def write_groups(folder: Path) -> None:
    lines = [f'{{"word": "{"abcdefghijkl"[at % GROUPS] * 40} {at}"}}' for at in range(GROUPS * ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def a_job(folder: Path, model: Path, **changes: Any) -> Job:
    settings = {"model__path": str(model), "generation__max_tokens": 24, "generation__temperature": 1.0}
    return make_job(folder, **settings | {"engine__memory": "64MiB", "run__checkpoint_seconds": 0.2} | changes)


def ray_workers() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        if "ray::_Actor" in " ".join(process.cmdline()) or process.name().startswith("ray::_Actor"):
            yield process


def kill_one_worker(output: Path, killed: list[int]) -> None:
    """As soon as the first rows are journaled."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(output.glob("__batchgen__/journal/*.arrow")):
            for process in ray_workers():
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return
        time.sleep(0.02)


@pytest.mark.slow
def test_two_workers_make_the_output_of_one(tmp_path: Path, model: Path) -> None:
    write_groups(tmp_path)
    alone = run(a_job(tmp_path, model))
    with models_on("ray", 2) as models:
        report = run(a_job(tmp_path, model, output__path="both"), models=models)
    assert not list(ray_workers())
    assert report.counts == alone.counts
    assert [row["completion"] for row in read_output(tmp_path / "both")] == [
        row["completion"] for row in read_output(tmp_path / "out")
    ]
    settings = manifest(tmp_path / "both")["settings"]
    assert settings["resolved_engine"]["workers"] == 2
    tokens = manifest(tmp_path / "both")["tokens"]
    computed = tokens["prompt_tokens"] - tokens["cached_tokens"]
    prompts = [list(f"Say {row['word']}".encode()) for row in read_output(tmp_path / "out")]
    longest, bound = max(map(len, prompts)), plan(prompts).distinct_tokens
    assert computed <= 1.02 * bound + 17 * (longest + 1)  # 16 pieces, and a beginning of sentence for each row's group


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_no_row(tmp_path: Path, model: Path) -> None:
    write_groups(tmp_path)
    long = {"generation__max_tokens": 60, "generation__ignore_eos": True, "engine__max_sequences": 16}
    killed: list[int] = []
    killer = threading.Thread(target=kill_one_worker, args=(tmp_path / "out", killed))
    with models_on("ray", 2) as models:
        killer.start()
        report = run(a_job(tmp_path, model, **long), models=models)
    killer.join()
    assert killed, "no worker was killed in time; the test showed nothing"
    assert report.exit_code == 0
    rows = read_output(tmp_path / "out")
    assert len(rows) == GROUPS * ROWS
    assert {row["finish_reason"] for row in rows} == {"length"}


@pytest.mark.slow
def test_a_signal_ends_the_run_cleanly_and_the_workers_with_it(tmp_path: Path, model: Path) -> None:
    write_groups(tmp_path)
    a_job(tmp_path, model, generation__max_tokens=400, generation__ignore_eos=True, engine__max_sequences=4)
    command = [str(Path(sys.executable).with_name("batchgen")), "run", str(tmp_path / "job.yaml")]
    process = subprocess.Popen([*command, "--on", "ray", "--workers", "2"], stderr=subprocess.PIPE, text=True)
    for _ in range(1200):
        if any((tmp_path / "out").glob("__batchgen__/journal/*.arrow")):
            break
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "the same command continues" in said
    assert family
    assert not psutil.wait_procs(family, timeout=20)[1]


def test_names_of_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path)
    path = str(tmp_path / "job.yaml")
    assert job.name
    assert cli.invoke(["run", path, "--on", "slurm"]) == 2
    assert "--on slurm: knows ray, alone or with an address like ray:10.0.0.1:6379" in capsys.readouterr().err
    assert cli.invoke(["run", path, "--workers", "2"]) == 2
    assert "--workers: goes with --on ray" in capsys.readouterr().err


def test_a_finished_job_starts_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"word": "a"}\n')
    run(make_job(tmp_path), models=FakeModels())
    with models_on("ray", 2) as models:
        for name in ("digest", "surroundings", "context_length", "generation_config", "tokenizer"):
            monkeypatch.setattr(models, name, getattr(FakeModels(), name))
        assert run(make_job(tmp_path), models=models).exit_code == 0
        assert models._cluster is None  # type: ignore[attr-defined]


def test_without_ray_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    from batchgen.jobs.cluster.ray_cluster import RayCluster

    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"pip install 'batchgen\[ray\]'"):
        RayCluster(None)


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:99999", "127.0.0.1:x"])
def test_an_address_where_nothing_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    from batchgen.jobs.cluster.ray_cluster import RayCluster

    def wait_for_ever(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray would wait for minutes")

    monkeypatch.setattr("ray.init", wait_for_ever)
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        address = address.format(port=bound.getsockname()[1])
        with pytest.raises(JobError, match=rf"--on ray: no cluster at {address} \("):
            RayCluster(address)


# map_batches


def table(start: int, stop: int) -> pa.Table:
    return pa.table({"doc": [f"row {at % 50}" for at in range(start, stop)], "at": list(range(start, stop))})


def test_map_batches_keeps_rows_and_schema() -> None:
    annotated = Annotate(EchoEngine(), {"text": "{{ doc }}"})
    first, second = annotated(table(0, 10)), annotated(table(10, 13))
    assert first.num_rows == 10
    assert first.schema == second.schema
    assert first.column_names == ["doc", "at", "completion", "finish_reason", "usage", "error"]
    assert first.column("completion").to_pylist()[3] == "ow 3"


def test_map_batches_keeps_rows_that_fail() -> None:
    answered = Annotate(EchoEngine(), {"text": "{{ doc }}"})(pa.table({"doc": ["a", None, "b"]}))
    assert answered.column("completion").to_pylist() == ["a", None, "b"]
    assert answered.column("error").to_pylist()[1]["code"] == "null_value"


@pytest.mark.parametrize("position", [None, "at"])
def test_noise_does_not_depend_on_the_batch(model: Path, position: str | None) -> None:
    annotated = Annotate(
        str(model), {"text": "{{ doc }}", "chat": False}, {"max_tokens": 6, "temperature": 1.0}, position=position,
        memory="16MiB",
    )  # fmt: skip
    whole = annotated(table(0, 60)).column("completion").to_pylist()
    parts = [
        text for start in (0, 7) for text in annotated(table(start, {0: 7, 7: 60}[start]))["completion"].to_pylist()
    ]
    assert parts == whole
    equal_rows = [whole[at] == whole[at + 50] for at in range(10)]
    assert not all(equal_rows)  # `at` differs, and so does the noise


def test_rows_by_position_draw_what_annotate_draws(model: Path) -> None:
    from datasets import Dataset

    options: dict[str, Any] = {"prompt": {"text": "{{ doc }}", "chat": False}, "generation": {"max_tokens": 6}}
    annotated = Annotate(str(model), position="at", memory="16MiB", **options)
    expected = annotate(Dataset(table(0, 20)), model=str(model), memory="16MiB", **options)["completion"]
    assert annotated(table(0, 20)).column("completion").to_pylist() == list(expected)


def test_policies_that_drop_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt\.on_null: skip would drop rows"):
        Annotate(EchoEngine(), {"text": "{{ doc }}", "on_null": "skip"})
