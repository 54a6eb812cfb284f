"""Whose output it is: whatever decides the answers tells jobs apart, wherever it is written down."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeModels
from job_files import make_job, write_rows
from tiny import tiny_model

from batchgen.jobs import Job, run
from batchgen.jobs.check import check_job
from batchgen.jobs.errors import UsageError
from batchgen.jobs.fingerprint import differences, identity_of, identity_without_model
from batchgen.jobs.models import Models


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama3", tmp_path_factory.mktemp("model") / "model")


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    change(values)
    path.write_text(json.dumps(values))


def merge(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda known: known.update(values)


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("generation_config.json", merge(temperature=0.1), "generation.temperature"),
        ("generation_config.json", merge(do_sample=False), "generation.temperature"),
        ("generation_config.json", merge(eos_token_id=[7]), "model.eos_ids"),
        ("config.json", merge(rope_theta=123.0), "model.config"),
        ("tokenizer_config.json", merge(chat_template="{{ messages[0].content }}"), "model.tokenizer"),
        ("tokenizer.json", merge(added=1), "model.tokenizer"),
        ("chat_template.json", merge(chat_template="x"), "model.tokenizer"),
    ],
)
def test_each_file_of_the_model_counts(
    tmp_path: Path, original: Path, name: str, change: Callable[[dict[str, Any]], Any], key: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(original, model)
    job = make_job(tmp_path, model__path="model")
    before = identity_of(job, Models())
    assert before == identity_of(job, Models())
    edit(model / name, change)
    phrases = differences(before, identity_of(job, Models()))
    assert any(phrase.startswith(key) for phrase in phrases), phrases


def test_who_saved_a_config_does_not_count(tmp_path: Path, original: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(original, model)
    job = make_job(tmp_path, model__path="model")
    before = identity_of(job, Models())
    edit(model / "config.json", merge(transformers_version="99.0", _name_or_path="elsewhere"))
    assert differences(before, identity_of(job, Models())) == []


def test_a_value_counts_wherever_it_is_set(tmp_path: Path) -> None:
    models = FakeModels(generation={"temperature": 0.5})
    silent, explicit = make_job(tmp_path), make_job(tmp_path, generation__temperature=0.5)
    assert identity_of(silent, models) == identity_of(explicit, FakeModels())
    assert differences(identity_of(silent, models), identity_of(silent, FakeModels()))


def test_another_generation_config_is_another_job(tmp_path: Path) -> None:
    write_rows(tmp_path, 5)
    job = make_job(tmp_path)
    run(job, models=FakeModels(generation={"temperature": 0.1}))
    models = FakeModels(generation={"temperature": 2.0})
    with pytest.raises(UsageError, match=r"different job \(generation\.temperature: was 0\.1, is 2\.0\)"):
        run(job, models=models)
    assert models.loads == 0


def test_a_model_from_the_hub_is_compared_by_what_the_job_says(tmp_path: Path) -> None:
    models = FakeModels(generation={"temperature": 0.5})
    job = make_job(tmp_path, generation__top_k=5)
    stored = identity_of(job, models)
    assert identity_without_model(job, stored) == stored
    other = make_job(tmp_path, generation__top_k=6)
    assert differences(stored, identity_without_model(other, stored)) == ["generation.top_k: was 5, is 6"]


def test_everything_done_is_found_without_torch(tmp_path: Path, original: Path) -> None:
    import subprocess
    import sys

    write_rows(tmp_path, 3)
    job = make_job(tmp_path, model__path=str(original), model__dtype="float32", generation__max_tokens=2)
    run(job)
    again = (
        "import sys; from batchgen.jobs import Job, run; report = run(Job.load(sys.argv[1])); "
        "assert report.asked == 0; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", again, job.source], check=False).returncode == 0


class TestTheOutputIsNoInput:
    @pytest.mark.parametrize(
        ("path", "form"),
        [
            ("**/*.jsonl", "jsonl"), ("*/*.jsonl", "jsonl"), ("out/data*", "jsonl"), ("**/train-*", "parquet"),
            ("out/*.arrow", "arrow"), ("**", "arrow"),
        ],
    )  # fmt: skip
    def test_globs_that_would_find_it(self, tmp_path: Path, path: str, form: str) -> None:
        write_rows(tmp_path, 3)
        with pytest.raises(UsageError, match=r"output\.path: its .* would be input by"):
            run(make_job(tmp_path, input__path=path, output__format=form), models=FakeModels())
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(("path", "form"), [("*.jsonl", "jsonl"), ("**/rows*.jsonl", "jsonl"), ("o*/x", "arrow")])
    def test_globs_that_would_not(self, tmp_path: Path, path: str, form: str) -> None:
        (tmp_path / "other").mkdir()
        write_rows(tmp_path / "other", 3, name="x")
        write_rows(tmp_path, 3)
        job = make_job(tmp_path, input__path=path, input__format="jsonl", output__format=form)
        for _ in range(2):
            assert run(job, models=FakeModels()).counts["rows"] == 3

    def test_files_inside_it(self, tmp_path: Path) -> None:
        (tmp_path / "out" / "__batchgen__").mkdir(parents=True)
        write_rows(tmp_path / "out", 3, name="mine.jsonl")
        with pytest.raises(UsageError, match=r"input\.path: out/mine\.jsonl lies inside output\.path"):
            run(make_job(tmp_path, input__path="out/mine.jsonl"), models=FakeModels())


class TestPromptsBeforeTheModel:
    """What the prompt section and the model's text files have against each other is told before weights are read."""

    def refused(self, job: Job, words: str) -> None:
        models = FakeModels()
        with pytest.raises(Exception, match=words) as caught:
            run(job, models=models)
        assert (caught.value.exit_code, models.loads) == (2, 0)  # type: ignore[attr-defined]

    def test_a_chat_template_that_does_not_parse(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 3)
        (tmp_path / "chat.jinja").write_text("a\n{% if %}")
        job = make_job(tmp_path, model__chat_template="chat.jinja")
        self.refused(job, r"job\.yaml: model\.chat_template: line 2: ")
        with pytest.raises(UsageError, match=r"model\.chat_template: line 2: "):
            check_job(job, FakeModels())

    def test_a_model_without_a_chat_template(self, tmp_path: Path) -> None:
        write_rows(tmp_path, 3)
        self.refused(make_job(tmp_path, prompt__chat=True), "chat template")
