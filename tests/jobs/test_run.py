"""A job from its file to its data set, on a model without weights: outcomes, resume, growth, retries."""

import errno
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_output, visible, write_rows

from batchgen.engine.request import Request
from batchgen.jobs import Job, run
from batchgen.jobs.check import check_job
from batchgen.jobs.errors import JobError, UsageError
from batchgen.jobs.journal import Journal
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.status import describe_status, read_status
from batchgen.jobs.writer import JournalWriter
from batchgen.pipeline.rows import InputError


def retry(words: str) -> RunOptions:
    return RunOptions(retry=parse_retry(words))


def broken_after(rows: int) -> FakeModels:
    """An engine that fails for good after some rows."""
    seen: list[int] = []

    def before(request: Request) -> None:
        seen.append(request.key)
        if len(seen) > rows:
            raise RuntimeError("the device is gone")

    return FakeModels(FakeEngine(before=before))


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_one_row_out_per_row_in_whatever_the_format(tmp_path: Path, form: str) -> None:
    write_rows(tmp_path, 30)
    report = run(make_job(tmp_path, output__format=form), models=FakeModels())
    rows = read_output(tmp_path / "out", form)
    assert [row["nested"]["list"][0] for row in rows] == list(range(30))
    assert all(row["nested"]["name"] == "ä" for row in rows)
    failed = [at for at, row in enumerate(rows) if row["error"]]
    assert failed == [5, 16, 27]
    assert {rows[5]["error"]["code"], rows[5]["finish_reason"]} == {"null_value", "error"}
    assert rows[5]["completion"] is None
    assert report.exit_code == 0
    counts = manifest(tmp_path / "out")["counts"]
    assert counts == report.counts
    assert counts["rows"] == sum(counts[name] for name in ("stop", "length", "error", "skipped")) == 30
    assert counts["error"] == 3


def test_the_time_the_engine_waited_for_rows_adds_up_over_runs(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    run(make_job(tmp_path, input__limit=10), models=that_waits(2.0))
    assert manifest(tmp_path / "out")["times"]["host_wait_seconds"] == 2.0
    run(make_job(tmp_path), models=that_waits(3.0))
    assert manifest(tmp_path / "out")["times"]["host_wait_seconds"] == 5.0


def that_waits(seconds: float) -> FakeModels:
    """An engine that has waited so long for its rows when the first of them comes."""
    models = FakeModels()
    models.fake.before = lambda request: setattr(models.fake.statistics, "host_wait_seconds", seconds)
    return models


def test_sidecars(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    run(make_job(tmp_path, generation__seed=3, run__price_per_hour=3600), models=FakeModels())
    sidecar = tmp_path / "out" / "__batchgen__"
    assert not (sidecar / "journal").exists()
    assert not (sidecar / "lock.json").exists()
    assert (sidecar / "job.yaml").is_file()
    stored = manifest(tmp_path / "out")
    assert stored["state"] == "finished"
    assert stored["settings"]["generation"]["seed"] == 3
    assert stored["settings"]["generation_origins"]["seed"] == "job"
    assert stored["model"]["digest"] == "fake"
    assert stored["tokenizer"]["digest"] == "bytes"
    assert stored["versions"]["batchgen"]
    assert stored["tokens"]["completion_tokens"] > 0
    assert stored["cost"]["total"] == pytest.approx(stored["times"]["seconds"], abs=1e-3)
    events = [json.loads(line) for line in (sidecar / "log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "progress", "finished"]
    assert 0 <= events[1]["speed"]["host_wait"] <= 1
    status = read_status(tmp_path / "out")
    assert status.speed["rows_per_second"] > 0
    assert "null_value: column 'word' is null" in (status.last_error or "")


def test_everything_done_loads_no_model(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    models = FakeModels()
    job = make_job(tmp_path)
    run(job, models=models)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*.*")}
    assert run(job, models=models).exit_code == 0
    assert models.loads == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*.*")} == before


def test_a_failed_run_keeps_what_was_finished(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    job = make_job(tmp_path)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(job, models=broken_after(20))
    assert visible(tmp_path / "out") == []
    assert manifest(tmp_path / "out")["state"] == "failed"
    status = read_status(tmp_path / "out")
    assert (status.state, status.alive) == ("failed", False)
    assert 0 < status.done < 40
    assert "the device is gone" in (status.last_error or "")
    models = FakeModels()
    run(job, models=models)
    assert (
        len(models.fake.asked) == 40 - status.done - sum(1 for at in range(40) if at % 11 == 5) + status.counts["error"]
    )
    again = make_job(tmp_path, output__path="whole")
    run(again, models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")


def test_several_samples_and_logprobs(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    run(make_job(tmp_path, generation__n=3, generation__logprobs=1), models=FakeModels())
    rows = read_output(tmp_path / "out")
    assert len(rows[0]["completion"]) == len(rows[0]["logprobs"]) == 3
    assert len(set(rows[0]["completion"])) == 3
    assert (rows[5]["completion"], rows[5]["finish_reason"]) == (None, ["error"])


def test_columns_prefix_and_types(tmp_path: Path) -> None:
    deep = pa.struct([("a", pa.list_(pa.struct([("b", pa.int16())])))])
    table = pa.table(
        {
            "word": ["a", "b", "c"],
            "fixed": pa.array([b"12", b"34", None], pa.binary(2)),
            "large": pa.array([[1], [], None], pa.large_list(pa.int8())),
            "time": pa.array([1, 2, None], pa.time32("ms")),
            "deep": pa.array([{"a": [{"b": None}]}, None, {"a": None}], deep),
            "error": ["kept", "as", "it is"],
        }
    )  # fmt: skip
    pq.write_table(table, tmp_path / "rows.parquet")
    job = make_job(tmp_path, input__path="rows.parquet", output__prefix="new_", output__format="parquet")
    run(job, models=FakeModels())
    written = pq.read_table(tmp_path / "out" / "data" / "train-00000-of-00001.parquet")
    assert written.select(table.schema.names).to_pylist() == table.to_pylist()
    assert [written.schema.field(name).type for name in table.schema.names] == [field.type for field in table.schema]
    few = make_job(tmp_path, input__path="rows.parquet", output__path="few", output__columns=["word"])
    run(few, models=FakeModels())
    assert set(read_output(tmp_path / "few")[0]) == {"word", "completion", "finish_reason", "usage", "error"}


def test_a_column_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"word": "a", "error": 1}\n')
    models = FakeModels()
    with pytest.raises(UsageError, match=r"column 'error'.*set output\.prefix"):
        run(make_job(tmp_path), models=models)
    assert models.loads == 0


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
@pytest.mark.parametrize("content", ["", '{"word": null}\n'])
def test_nothing_left_is_an_empty_data_set(tmp_path: Path, form: str, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content or '{"word": "x"}\n')
    if not content:
        pq.write_table(pa.table({"word": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    job = make_job(
        tmp_path,
        input__path="rows.jsonl" if content else "rows.parquet",
        prompt__on_null="skip",
        output__format=form,
    )
    models = FakeModels()
    assert run(job, models=models).exit_code == 0
    assert run(job, models=models).exit_code == 0
    assert read_output(tmp_path / "out", form) == []
    if form == "arrow":
        names = datasets.load_from_disk(str(tmp_path / "out")).column_names
        assert names == ["word", "completion", "finish_reason", "usage", "error"]
    if form == "parquet":
        assert pq.read_schema(tmp_path / "out/data/train-00000-of-00001.parquet").names[-1] == "error"


def test_skipped_rows_stay_skipped(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    job = make_job(tmp_path, prompt__on_null="skip")
    with pytest.raises(RuntimeError):
        run(job, models=broken_after(30))
    journal = Journal(tmp_path / "out" / "__batchgen__" / "journal", 7)
    tombstones = sorted(int(at) for positions, codes in journal.recover() for at in positions[codes == 3])
    assert tombstones
    report = run(job, models=FakeModels())
    assert report.counts["skipped"] == 4
    assert manifest(tmp_path / "out")["skipped"] == [5, 16, 27, 38]
    rows = read_output(tmp_path / "out")
    assert [row["nested"]["list"][0] for row in rows] == [at for at in range(40) if at % 11 != 5]


def test_skipped_rows_are_journaled_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"word": null}\n' * 9000 + '{"word": "x"}\n')
    put = JournalWriter.put
    sizes: list[int] = []

    def counted(self: JournalWriter, rows: pa.RecordBatch) -> None:
        sizes.append(rows.num_rows)
        put(self, rows)

    monkeypatch.setattr(JournalWriter, "put", counted)
    job = make_job(tmp_path, prompt__on_null="skip", output__shard_rows=1000)
    assert run(job, models=FakeModels()).counts["skipped"] == 9000
    assert sum(sizes) == 9001
    assert len(sizes) < 50


class TestGrowth:
    """New rows under the same path: only they are generated, and the data set then holds both."""

    @pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
    @pytest.mark.parametrize("logprobs", [None, 1])
    def test_appended_lines(self, tmp_path: Path, form: str, logprobs: int | None) -> None:
        options: dict[str, Any] = {
            "output__format": form, "prompt__on_null": "skip", "generation__logprobs": logprobs, "generation__n": 2,
        }  # fmt: skip
        job = make_job(tmp_path, **options)
        for night in range(4):
            write_rows(tmp_path, 9, start=9 * night, mode="a")
            models = FakeModels()
            run(job, models=models)
            assert sorted(models.fake.asked) == [at for at in range(9 * night, 9 * night + 9) if at % 11 != 5]
        run(make_job(tmp_path, **options, output__path="whole"), models=FakeModels())
        assert read_output(tmp_path / "out", form) == read_output(tmp_path / "whole", form)
        assert visible(tmp_path / "out") == visible(tmp_path / "whole")
        ours, whole = manifest(tmp_path / "out"), manifest(tmp_path / "whole")
        assert [ours[key] for key in ("counts", "skipped", "tokens")] == [
            whole[key] for key in ("counts", "skipped", "tokens")
        ]

    def test_new_files_come_after_the_known_ones(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 5, start=100, name="b.jsonl")
        job = make_job(tmp_path, input__path="*.jsonl")
        run(job, models=FakeModels())
        first = read_output(tmp_path / "out")
        write_rows(tmp_path, 5, start=0, name="a.jsonl")
        run(job, models=FakeModels())
        rows = read_output(tmp_path / "out")
        assert rows[:5] == first
        assert [row["nested"]["list"][0] for row in rows] == [*range(100, 105), *range(5)]

    def test_changed_and_missing_files_are_refused(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path, 5)
        job = make_job(tmp_path)
        run(job, models=FakeModels())
        path.write_text(path.read_text().replace("word 1", "worm 1"))
        with pytest.raises(Exception, match=r"rows\.jsonl: changed since this job began") as caught:
            run(job, models=FakeModels())
        assert caught.value.exit_code == 2  # type: ignore[attr-defined]
        assert len(read_output(tmp_path / "out")) == 5

    def test_a_limit_that_is_raised_and_lowered(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 30)
        job = make_job(tmp_path)
        asked = []
        for limit in (10, 20, 5, 20):
            models = FakeModels()
            assert run(job.with_limit(limit), models=models).exit_code == 0
            asked.append(len(models.fake.asked))
        assert asked == [9, 9, 0, 0]
        assert len(read_output(tmp_path / "out")) == 20
        run(job, models=FakeModels())
        assert [row["nested"]["list"][0] for row in read_output(tmp_path / "out")] == list(range(30))

    def test_rows_beyond_a_lowered_limit_are_kept(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 40)
        job = make_job(tmp_path)
        with pytest.raises(RuntimeError):
            run(job, models=broken_after(30))
        done = read_status(tmp_path / "out").done
        run(job.with_limit(3), models=FakeModels())
        assert len(read_output(tmp_path / "out")) == 3
        models = FakeModels()
        run(job, models=models)
        assert len(models.fake.asked) <= 40 - done
        run(make_job(tmp_path, output__path="whole"), models=FakeModels())
        assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")


class TestRetry:
    """Asking again only rows with an outcome; finished rows stay as they are."""

    def test_errors(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 20)
        job = make_job(tmp_path)
        run(job, models=FakeModels())
        models = FakeModels()
        report = run(job, retry("errors"), models)
        assert (report.asked, report.counts["error"]) == (2, 2)
        assert len(read_output(tmp_path / "out")) == 20
        assert run(job, retry("length"), FakeModels()).asked == report.counts["length"]

    def test_length_with_a_larger_max_tokens(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 20)
        run(make_job(tmp_path), models=FakeModels())
        short = read_output(tmp_path / "out")
        larger = make_job(tmp_path, generation__max_tokens=40)
        with pytest.raises(UsageError, match=r"generation\.max_tokens: was 12, is 40"):
            run(larger, models=FakeModels())
        report = run(larger, retry("length"), FakeModels())
        cut = [at for at, row in enumerate(short) if row["finish_reason"] == "length"]
        assert report.asked == len(cut) > 0
        long = read_output(tmp_path / "out")
        for at, (before, after) in enumerate(zip(short, long, strict=True)):
            if at in cut:
                assert after["completion"].startswith(before["completion"])
                assert after["finish_reason"] == "stop"
            else:
                assert after == before
        stored = manifest(tmp_path / "out")
        assert stored["settings"]["generation"]["max_tokens"] == 40
        assert stored["counts"]["length"] == 0
        for job in (larger, make_job(tmp_path)):
            models = FakeModels()
            assert run(job, models=models).exit_code == 0
            assert models.loads == 0

    def test_a_retry_that_breaks_off_keeps_the_earlier_answers(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 30)
        job = make_job(tmp_path)
        run(job, models=FakeModels())
        before = read_output(tmp_path / "out")
        with pytest.raises(RuntimeError):
            run(job, retry("length"), broken_after(4))
        assert read_output(tmp_path / "out") == before
        run(job, models=FakeModels())
        assert read_output(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt__text": "Tell {{ word }}"}, r"prompt\.text: was \"Say \{\{ word \}\}\", is \"Tell"),
        ({"generation__seed": 1}, r"generation\.seed: was 0, is 1"),
        ({"generation__stop": ["x"]}, r"generation\.stop: was \[\], is \[\"x\"\]"),
        ({"generation__per_row": {"seed": "word"}}, r"generation\.per_row\.seed: was absent"),
        ({"model__dtype": "float32"}, r"model\.dtype: was \"auto\", is \"float32\""),
        ({"output__format": "jsonl"}, r"output\.format: was \"arrow\", is \"jsonl\""),
        ({"output__shard_rows": 8}, r"output\.shard_rows: was 7, is 8"),
        ({"generation__max_tokens": 13}, r"generation\.max_tokens: was 12, is 13"),
    ],
)  # fmt: skip
def test_another_job_is_told_apart(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_rows(tmp_path, 5)
    run(make_job(tmp_path), models=FakeModels())
    models = FakeModels()
    with pytest.raises(UsageError, match=f"belongs to a different job .*{words}.*--fresh"):
        run(make_job(tmp_path, **changes), models=models)
    assert models.loads == 0
    assert len(read_output(tmp_path / "out")) == 5


def test_only_the_system_message_changed(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "{{ word }}"}]
    models = FakeModels()
    models.fake.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    run(make_job(tmp_path, prompt__text=None, prompt__messages=chat), models=models)
    chat[0]["content"] = "Be terse."
    with pytest.raises(UsageError, match=r"prompt\.messages\[0\]\.content: was \"Be kind\.\", is \"Be terse\.\""):
        run(make_job(tmp_path, prompt__text=None, prompt__messages=chat), models=models)


def test_another_model_is_told_apart_and_engine_settings_are_not(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    run(make_job(tmp_path), models=FakeModels())
    with pytest.raises(UsageError, match=r"model\.digest: was \"fake\", is \"other\""):
        run(make_job(tmp_path), models=FakeModels(weights="other"))
    changed = make_job(
        tmp_path, engine__block_size=8, engine__prefix_sharing=False, run__checkpoint_seconds=9, name="x"
    )
    assert run(changed, models=FakeModels()).asked == 0


def test_fresh_starts_over_and_touches_nothing_else(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    run(make_job(tmp_path, output__format="parquet"), models=FakeModels())
    (tmp_path / "out" / "notes.txt").write_text("mine")
    changed = make_job(tmp_path, prompt__text="Tell {{ word }}")
    models = FakeModels()
    assert run(changed, RunOptions(fresh=True), models).asked == 5
    assert visible(tmp_path / "out") == [
        "data-00000-of-00001.arrow", "dataset_info.json", "notes.txt", "state.json",
    ]  # fmt: skip


def test_a_foreign_directory_is_not_touched(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data-00000-of-00001.arrow").write_bytes(b"precious")
    with pytest.raises(UsageError, match="holds files that batchgen did not write"):
        run(make_job(tmp_path), RunOptions(fresh=True), FakeModels())
    assert visible(tmp_path / "out") == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize(("allowed", "exit_code"), [(None, 0), (3, 0), (2, 3), ("10%", 0), ("9%", 3), (0, 3)])
def test_too_many_failures(tmp_path: Path, allowed: int | str | None, exit_code: int) -> None:
    write_rows(tmp_path, 30)
    job = make_job(tmp_path, run__max_failures=allowed)
    first = run(job, models=FakeModels())
    again = run(job, models=FakeModels())
    assert (first.exit_code, again.exit_code) == (exit_code, exit_code)
    assert len(read_output(tmp_path / "out")) == 30


def test_max_tokens_beyond_the_context(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    models = FakeModels(context=12)
    with pytest.raises(UsageError, match=r"generation\.max_tokens: 12 leaves no room.*context of 12"):
        run(make_job(tmp_path), models=models)
    with pytest.raises(UsageError, match=r"256 leaves no room.*context of 256"):
        run(make_job(tmp_path, generation__max_tokens=None), models=FakeModels(context=256))
    assert not (tmp_path / "out").exists()


def test_values_of_the_model_are_used_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, 5)
    models = FakeModels(generation={"do_sample": False, "top_k": 7})
    run(make_job(tmp_path), RunOptions(quiet=False), models)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sampling: ")]
    assert len(shown) == 1
    assert "temperature 0.0 (model)" in shown[0]
    assert "top_k 7 (model)" in shown[0]
    assert manifest(tmp_path / "out")["settings"]["generation"]["top_k"] == 7
    with pytest.raises(JobError, match=r"generation_config\.json: top_p: "):
        run(make_job(tmp_path, output__path="b"), models=FakeModels(generation={"top_p": 2.0}))


def test_the_day_that_templates_are_told_stays(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    job = make_job(tmp_path)
    models = broken_after(8)
    models.fake.tokenizer.chat_template = "{{ strftime_now('%Y') }} {{ messages[0].content }}"
    with pytest.raises(RuntimeError):
        run(job, models=models)
    path = tmp_path / "out" / "__batchgen__" / "manifest.json"
    path.write_text(path.read_text().replace(manifest(tmp_path / "out")["template_date"], "1999-12-31"))
    prompts: list[bytes] = []
    models = FakeModels(FakeEngine(before=lambda request: prompts.append(bytes(request.prompt))))
    models.fake.tokenizer.chat_template = "{{ strftime_now('%Y') }} {{ messages[0].content }}"
    run(job, models=models)
    assert prompts
    assert all(prompt.startswith(b"1999 ") for prompt in prompts)


def test_a_full_disk_while_journaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, 200)
    job = make_job(tmp_path)
    written = Journal.append
    segments: list[int] = []

    def append(self: Journal, rows: pa.Table) -> None:
        segments.append(rows.num_rows)
        if len(segments) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append)
        with pytest.raises(OSError, match="No space left"):
            run(job, models=FakeModels(FakeEngine(seconds=0.02)))
    done = read_status(tmp_path / "out").done
    assert done == sum(segments[:2])
    models = FakeModels()
    run(job, models=models)
    assert len(models.fake.asked) <= 200 - done
    assert len(read_output(tmp_path / "out")) == 200


def test_a_broken_segment_is_asked_again(tmp_path: Path) -> None:
    write_rows(tmp_path, 40)
    job = make_job(tmp_path)
    models = broken_after(30)
    models.fake.seconds = 0.02
    with pytest.raises(RuntimeError):
        run(job, models=models)
    segments = sorted((tmp_path / "out" / "__batchgen__" / "journal").iterdir())
    segments[0].write_bytes(segments[0].read_bytes()[:-5])
    run(job, models=FakeModels())
    run(make_job(tmp_path, output__path="whole"), models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")
    log = (tmp_path / "out" / "__batchgen__" / "log.jsonl").read_text()
    assert f'"broken_segment", "path": "{segments[0].name}"' in log


def test_an_engine_that_forgets_or_repeats_rows_is_no_success(tmp_path: Path) -> None:
    class Forgetful(FakeEngine):
        def _complete(self, request: Request) -> Any:
            return super()._complete(request)

        def run(self, requests: Any) -> Any:
            yield from (completion for completion in super().run(requests) if completion.key != 7)

    write_rows(tmp_path, 20)
    with pytest.raises(Exception, match="7"):
        run(make_job(tmp_path), models=FakeModels(Forgetful()))
    assert visible(tmp_path / "out") == []


@pytest.mark.parametrize("seed", range(8))
def test_rows_in_are_rows_out_whatever_the_order(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    write_rows(tmp_path, 60)
    write_rows(tmp_path, 20, mode="a")  # equal prompts: each keeps its own samples
    engine = FakeEngine(width=choose.randint(1, 9), before=lambda _: time.sleep(choose.choice([0, 0, 0.002])))
    run(make_job(tmp_path, generation__n=4, output__shard_rows=choose.randint(1, 50)), models=FakeModels(engine))
    rows = read_output(tmp_path / "out")
    assert [row["nested"]["list"][0] for row in rows] == [*range(60), *range(20)]
    assert all(row["completion"] is None or len(row["completion"]) == 4 for row in rows)
    assert rows[0]["completion"] != rows[60]["completion"]


def test_metrics_for_prometheus(tmp_path: Path) -> None:
    write_rows(tmp_path, 10)
    run(make_job(tmp_path, run__metrics_file="metrics/job.prom", name='a "b"'), models=FakeModels())
    lines = (tmp_path / "metrics" / "job.prom").read_text().splitlines()
    assert r'batchgen_rows_done{job="a \"b\""} 10' in lines
    assert r'batchgen_running{job="a \"b\""} 0' in lines
    assert any(line.startswith(r'batchgen_tokens{job="a \"b\"",kind="output"} ') for line in lines)
    assert all(line.startswith("#") or len(line.rsplit(" ", 1)) == 2 for line in lines)


def test_the_jobs_own_deadline_counts_without_a_command_line(tmp_path: Path) -> None:
    write_rows(tmp_path, 400)
    report = run(make_job(tmp_path, run__deadline="0.5s"), models=FakeModels(FakeEngine(seconds=0.05)))
    assert (report.exit_code, report.stopped) == (4, "deadline")


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    write_rows(tmp_path, 10)
    first = run(make_job(tmp_path, output__path="a"), models=FakeModels())
    second = run(make_job(tmp_path, output__path="b"), models=FakeModels())
    assert first.counts == second.counts
    assert read_output(tmp_path / "a") == read_output(tmp_path / "b")


def test_status_of_a_finished_job(tmp_path: Path) -> None:
    write_rows(tmp_path, 10)
    report = run(make_job(tmp_path), models=FakeModels())
    status = read_status(tmp_path / "out")
    assert (status.done, status.left, status.counts) == (10, 0, report.counts)
    assert status.tokens == report.tokens
    assert json.loads(status.to_json())["state"] == "finished"
    assert "rows: 10 of 10 done, 1 failed, 0 left" in list(describe_status(status))
    with pytest.raises(UsageError, match="no output of batchgen is here"):
        read_status(tmp_path)


def test_job_and_run_are_the_packages_face() -> None:
    import batchgen.jobs

    assert callable(batchgen.jobs.run)
    assert batchgen.jobs.Job is Job


def test_damage_in_a_column_no_prompt_uses_is_that_row_s_error(tmp_path: Path) -> None:
    values = {"word": [f"word {at}" for at in range(30)], "extra": [f"extra {at} {'y' * 50}" for at in range(30)]}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(values), path, row_group_size=10, write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(1).column(1)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset - 30] ^= 0xFF  # inside the dictionary page
    path.write_bytes(content)
    report = run(make_job(tmp_path, input__path="rows.parquet"), models=FakeModels())
    rows = read_output(tmp_path / "out")
    assert len(rows) == 30
    for at, row in enumerate(rows):
        assert (row["error"] is None) == (not 10 <= at < 20)
    assert {row["error"]["code"] for row in rows[10:20]} == {"bad_row"}
    assert {(row["completion"], row["finish_reason"]) for row in rows[10:20]} == {(None, "error")}
    assert report.counts["error"] == 10
    assert run(make_job(tmp_path, input__path="rows.parquet"), models=FakeModels()).counts["error"] == 10


def test_a_stop_id_without_a_token_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    write_rows(tmp_path, 3)
    models = FakeModels()
    with pytest.raises(UsageError, match=r"generation\.stop_token_ids: .* none with id 99999"):
        run(make_job(tmp_path, generation__stop_token_ids=[99_999]), models=models)
    assert models.loads == 0


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_a_column_that_cannot_be_written_is_refused_before_the_model(tmp_path: Path, form: str) -> None:
    months = pa.array([pa.MonthDayNano([1, 2, 3])] * 2)
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), pa.schema([("word", pa.string()), ("m", months.type)])) as file:
        file.write_batch(pa.record_batch({"word": ["a", "b"], "m": months}))
    models = FakeModels()
    job = make_job(tmp_path, input__path="rows.arrow", output__format=form)
    message = rf"job\.yaml: output\.format: {form} cannot hold column 'm' .*output\.columns"
    with pytest.raises(UsageError, match=message):
        check_job(job, models)
    with pytest.raises(UsageError, match=message):
        run(job, models=models)
    assert models.loads == 0
    job = make_job(tmp_path, input__path="rows.arrow", output__format=form, output__columns=["word"])
    assert run(job, RunOptions(fresh=True), models).counts["rows"] == 2


def test_text_views_reach_the_output(tmp_path: Path) -> None:
    words = pa.array(["a", "b", None], pa.string_view())
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), pa.schema([("word", words.type)])) as file:
        file.write_batch(pa.record_batch({"word": words}))
    run(make_job(tmp_path, input__path="rows.arrow", prompt__on_null="skip"), models=FakeModels())
    assert [row["word"] for row in read_output(tmp_path / "out")] == ["a", "b"]


def test_a_row_nested_too_deep_is_its_own_error(tmp_path: Path) -> None:
    deep = "[" * 100 + "]" * 100
    (tmp_path / "rows.jsonl").write_text(f'{{"word": "a", "x": [1]}}\n{{"word": "b", "x": {deep}}}\n')
    run(make_job(tmp_path), models=FakeModels())
    rows = read_output(tmp_path / "out")
    assert [(row["error"] or {}).get("code") for row in rows] == [None, "bad_row"]


def test_format_and_columns_may_change_until_something_is_published(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(make_job(tmp_path), models=broken_after(12))
    done = read_status(tmp_path / "out").done
    assert done > 0
    with pytest.raises(UsageError, match=r"output\.prefix: was"):
        run(make_job(tmp_path, output__prefix="p_"), models=FakeModels())
    models = FakeModels()
    changed = make_job(tmp_path, output__format="jsonl", output__columns=["word"])
    run(changed, models=models)
    assert len(models.fake.asked) <= 20 - done + 1
    rows = read_output(tmp_path / "out", "jsonl")
    assert [row["word"] for row in rows][:2] == ["word 0", "word 1"]
    assert "nested" not in rows[0]
    assert read_status(tmp_path / "out").counts["rows"] == 20
    with pytest.raises(UsageError, match=r"output\.format: was \"jsonl\", is \"arrow\""):
        run(make_job(tmp_path), models=FakeModels())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"word": "a"}\n{"word": "b"}\n'.encode("utf-16"), r"^rows\.jsonl line 1: not valid .*looks like UTF-16"),
        ('{"word": "a"}\n'.encode("utf-16-be"), r"^rows\.jsonl line 1: not valid .*looks like UTF-16"),
        (b'{"word": "a"}\r{"word": "b"}\r', r"^rows\.jsonl line 1: not valid JSON: .*carriage return"),
        (b'\n{\n  "word": "a"\n}\n', r"^rows\.jsonl line 2: not valid JSON: .*one JSON object per line"),
        (b"", r"^rows\.jsonl: the input has no rows and no columns"),
    ],
)
@pytest.mark.parametrize("identified", [False, True])
def test_an_input_without_a_readable_line_is_what_is_wrong(
    tmp_path: Path, content: bytes, words: str, identified: bool
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    job = make_job(tmp_path, **({"input__id": "word"} if identified else {}))
    for work in (check_job, lambda job, models: run(job, models=models)):
        with pytest.raises((UsageError, InputError), match=words) as caught:
            work(job, FakeModels())
        assert caught.value.exit_code == 2


def test_a_line_still_being_written_is_answered_once_it_is_whole(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"word": "la')
    counts = run(make_job(tmp_path), models=FakeModels()).counts
    assert (counts["rows"], counts["error"]) == (3, 0)
    assert "unfinished_line" in (tmp_path / "out" / "__batchgen__" / "log.jsonl").read_text()
    path.write_bytes(whole + b'{"word": "last"}\n')
    run(make_job(tmp_path), models=FakeModels())
    rows = read_output(tmp_path / "out")
    assert ([row["word"] for row in rows][3:], rows[3]["error"]) == (["last"], None)
