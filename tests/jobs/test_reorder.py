"""`prompt.reorder` through a whole job: chosen once, told, stored, kept by every later run."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeModels
from job_files import make_job, manifest, read_output

from batchgen.engine.gate import Choice
from batchgen.jobs import Job, formats, run
from batchgen.jobs.check import check_job
from batchgen.jobs.command_preview import preview_job
from batchgen.jobs.errors import JobError, UsageError
from batchgen.jobs.run import RunOptions

PROMPT = {"text": "{{ id }}\n\n{{ topic }}", "reorder": True}


def write(folder: Path, rows: range, repeats: str, mode: str = "w") -> None:
    """Rows in which the column `repeats` is the same everywhere."""
    with (folder / "rows.jsonl").open(mode, encoding="utf-8") as file:
        for at in rows:
            row = {"id": f"id {at}", "topic": f"topic {at}", repeats: "what is always the same"}
            file.write(json.dumps(row) + "\n")


class Asked(FakeModels):
    """Keeps the prompts as text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}
        self.fake.before = lambda request: self.texts.update({request.key: bytes(request.prompt).decode()})


def job(folder: Path, **overrides: Any) -> Job:
    return make_job(folder, prompt=PROMPT, **overrides)


def test_the_order_is_told_stored_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, range(20), "topic")
    models = Asked()
    run(job(tmp_path), RunOptions(quiet=False), models)
    assert models.texts[3] == "what is always the same\n\nid 3"
    assert "prompt.reorder: prompt.text as blocks 2, 1" in capsys.readouterr().err
    assert manifest(tmp_path / "out")["prompt_order"]["orders"] == {"prompt.text": [1, 0]}
    assert len(read_output(tmp_path / "out")) == 20


def test_the_choices_rest_on_the_prompts_that_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(20), "topic")
    monkeypatch.setattr(formats, "WORTH_TOKENS", 0)
    looked: list[str] = []

    class Looking(Asked):
        def formats(self, job: Job, prompts: Callable[[], Iterable[Sequence[int]]], shares: Any) -> Any:
            looked.extend(bytes(prompt).decode() for prompt in prompts())
            return Choice("native", "auto")

    models = Looking()
    run(job(tmp_path), models=models)
    assert looked == [models.texts[key] for key in range(20)]


def test_rows_added_later_do_not_change_it(tmp_path: Path) -> None:
    write(tmp_path, range(5), "topic")
    run(job(tmp_path), models=Asked())
    write(tmp_path, range(5, 50), "id", mode="a")  # by these, the other order would be better
    models = Asked()
    run(job(tmp_path), models=models)
    assert sorted(models.texts) == list(range(5, 50))
    assert models.texts[7] == "topic 7\n\nwhat is always the same"


def test_it_is_part_of_the_job(tmp_path: Path) -> None:
    write(tmp_path, range(5), "topic")
    run(job(tmp_path), models=Asked())
    with pytest.raises(UsageError, match=r"prompt\.reorder: was true, is false"):
        run(make_job(tmp_path, prompt={**PROMPT, "reorder": False}), models=Asked())


def test_a_template_without_anything_to_move_says_so(tmp_path: Path) -> None:
    write(tmp_path, range(20), "topic")
    alone = make_job(tmp_path, prompt={"text": "{{ id }} {{ topic }}", "reorder": True})
    assert any("no neighbouring blocks with fields" in line for line in preview_job(alone, 2, FakeModels()))


def test_preview_shows_the_prompts_that_a_run_asks(tmp_path: Path) -> None:
    write(tmp_path, range(20), "topic")
    models = FakeModels()
    lines = list(preview_job(job(tmp_path), 2, models))
    assert any(line.startswith("prompt.reorder: prompt.text as blocks 2, 1") for line in lines)
    assert "what is always the same\n\nid 0" in lines


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    write(tmp_path, range(5), "topic")
    assert not (tmp_path / "out").exists()
    fixed = make_job(tmp_path, prompt={"text": "{% set x = id %}{{ x }}\n\n{{ topic }}", "reorder": True})
    for refuse in (lambda: check_job(fixed, FakeModels()), lambda: run(fixed, models=FakeModels())):
        with pytest.raises(UsageError, match=r"prompt.text: has a \{% set %\}.* remove it, or prompt.reorder"):
            refuse()
    with pytest.raises(JobError, match=r"prompt\.reorder: goes only with text or messages"):
        make_job(tmp_path, prompt={"messages_column": "id", "reorder": True})
