"""`batchgen heads` on a tiny model: from answers of a job to heads that a job uses; refusals; nothing half done."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from job_files import make_job, manifest, read_quickly, write_job, write_rows

from batchgen.engine.draft import training
from batchgen.jobs import Job, run
from batchgen.jobs.answers import read_answers
from batchgen.jobs.cli import invoke


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model("llama3", tmp_path_factory.mktemp("heads") / "model")


def job_of(folder: Path, model: Path, **overrides: object) -> Job:
    settings = {"model__path": str(model), "model__dtype": "float32", "generation__temperature": 0, **overrides}
    return make_job(folder, **settings)


def written_rows(folder: Path) -> None:
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"word": f"w{at}"}) + "\n" for at in range(24))


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_heads_are_trained_on_an_output_and_used_by_a_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)  # paths on the command line are relative to where it is given
    written_rows(tmp_path)
    plain = {"output__format": form, "generation__ignore_eos": True}
    run(job_of(tmp_path, model, **plain, engine__speculation="off"))
    command = ["heads", os.path.relpath(model), "out", "trained", "--epochs", "2", "--heads", "2"]
    assert invoke(command) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("24 answers: ")
    assert [line.split(":")[0] for line in out[1:3]] == ["epoch 1", "epoch 2"]
    assert out[-1].startswith("trained: 2 heads, right on answers held out, by distance: ")
    speculation = {"kind": "medusa", "path": "trained"}  # relative to the job file
    run(job_of(tmp_path, model, **plain, output__path="again", engine__speculation=speculation))
    first, again = (read_quickly(tmp_path / name, form) for name in ("out", "again"))
    assert [row["completion"] for row in again] == [row["completion"] for row in first]
    assert manifest(tmp_path / "again")["speculation"]["drafted_tokens"] > 0


def test_prompts_of_an_output_are_those_it_was_asked(model: Path, tmp_path: Path) -> None:
    """Rows without an answer are left out, every one of n answers counts, and the prefix of columns is known."""
    write_rows(tmp_path, 12)
    job = job_of(tmp_path, model, generation__n=2, generation__temperature=1.0, output__prefix="a_")
    run(job)
    tokenizer = tiny.Tokenizer.from_file(str(model / "tokenizer.json"))
    found = read_answers(tmp_path / "out", str(model), _Encoder(tokenizer), 1000)
    assert len(found) == 22
    assert [prompt for prompt, _ in found[::2]] == [prompt for prompt, _ in found[1::2]]
    shown = [tokenizer.decode(prompt) for prompt, _ in found[::2]]
    assert [text for text in shown if "Say word" not in text] == []
    assert len(read_answers(tmp_path / "out", str(model), _Encoder(tokenizer), 5)) == 5


class _Encoder:
    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [one.ids for one in self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)]


def test_pairs_in_a_file(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"go {at}", "completion": "on and on"}) + "\n\n" for at in range(9)))
    assert invoke(["heads", str(model), str(data), str(tmp_path / "trained"), "--limit", "6"]) == 0
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert config["medusa_num_heads"] == len(config["held_out_accuracy"]) == 3


def test_only_line_feeds_end_a_line(model: Path, tmp_path: Path) -> None:
    data, text = tmp_path / "pairs.jsonl", "on\u2028and\x85on\x0b\x1c"
    pair = json.dumps({"prompt": f"go {text}", "completion": text}, ensure_ascii=False)
    data.write_bytes(f"{pair}\r\n{pair}\n".encode())
    tokenizer = tiny.Tokenizer.from_file(str(model / "tokenizer.json"))
    answers = read_answers(data, str(model), _Encoder(tokenizer), 5)
    assert [answer for _, answer in answers] == [tokenizer.encode(text, add_special_tokens=False).ids] * 2


PAIR = '{"prompt": "a", "completion": "the other one"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "neither an output directory nor a readable JSONL file"),
        ("", "holds no answer"),
        (PAIR + "{\n", 'line 2: must be an object with texts "prompt" and "completion"'),
        ('{"prompt": "a"}\n', "line 1: must be an object with texts"),
        (PAIR, "heads need two answers at least"),
        ('{"prompt": "a", "completion": "t"}\n' * 5, "no answer is longer than a token"),
    ],
)
def test_data_that_cannot_be_learned_from_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    data = tmp_path / "pairs.jsonl"
    if content is not None:
        data.write_text(content)
    assert invoke(["heads", str(model), str(data), str(tmp_path / "trained")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(data))
    assert words in line
    assert [path for path in tmp_path.iterdir() if path != data] == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"output__columns": []}, "the input has no column 'word'"),
        ({"output__format": "openai"}, "an OpenAI batch carries no prompts along"),
        ({"model__chat_template": "own.jinja"}, "has a chat template of its own"),
    ],
)
def test_outputs_without_their_prompts_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: dict, words: str
) -> None:
    written_rows(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    run(job_of(tmp_path, model, **overrides))
    assert invoke(["heads", str(model), str(tmp_path / "out"), str(tmp_path / "trained")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "JSONL file" in line


def test_what_is_no_output_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    assert invoke(["heads", str(model), str(tmp_path / "data"), str(tmp_path / "trained")]) == 2
    assert "is no output of batchgen" in capsys.readouterr().err


def full_disk(*_: object, **__: object) -> str:
    raise OSError(errno.ENOSPC, "full")


def test_heads_appear_whole_or_not_at_all(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tmp_path / "pairs.jsonl", tmp_path / "trained"
    data.write_text(PAIR * 4)
    out.mkdir()
    (out / "mine").touch()
    assert invoke(["heads", str(model), str(data), str(out)]) == 2
    assert "is not empty; name a new directory" in capsys.readouterr().err
    (out / "mine").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(training, "json", SimpleNamespace(dumps=full_disk))
        assert invoke(["heads", str(model), str(data), str(out)]) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "trained"]
    assert list(out.iterdir()) == []
    assert invoke(["heads", str(model), str(data), str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"config.json", "medusa_lm_head.safetensors"}


def test_heads_that_are_not_there_end_a_job_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written_rows(tmp_path)
    overrides = {"model__path": str(model), "engine__speculation": {"kind": "medusa", "path": "./nowhere"}}
    assert invoke(["run", str(write_job(tmp_path, **overrides)), "--quiet"]) == 2
    assert "engine.speculation.path: ./nowhere does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"kind": "medusa", "path": "nowhere"}, "engine.speculation.path: nowhere does not exist"),
        ({"kind": "medusa", "path": "."}, "engine.speculation.path: . has none of medusa_lm_head.safetensors"),
        ({"kind": "draft", "model": "./nowhere"}, "engine.speculation.model: ./nowhere does not exist"),
        ({"kind": "mtp", "path": "trained"}, "engine.speculation.path: unknown key"),
        ({"kind": "draft", "model": "trained"}, "model: trained holds Medusa heads and no model; write {kind: medusa"),
    ],
)
@pytest.mark.parametrize("command", ["check", "plan", "run"])
def test_a_drafter_that_is_not_there_is_told_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, speculation: dict[str, str], words: str
) -> None:
    written_rows(tmp_path)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained/medusa_lm_head.safetensors").write_bytes(b"")
    assert invoke([command, str(write_job(tmp_path, engine__speculation=speculation))]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
