"""The job file: what is refused, in which words, and how a file becomes a Job."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from job_files import make_job

from batchgen.jobs import Job
from batchgen.jobs.document import parse_assignments, parse_yaml
from batchgen.jobs.errors import UsageError

BASE = """
model: {path: model.gguf}
input: {path: data.jsonl}
prompt: {text: "Say {{ x }}"}
output: {path: out}
"""


def write(folder: Path, text: str = BASE, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def refusal(folder: Path, text: str = BASE, **overrides: object) -> str:
    with pytest.raises(UsageError) as caught:
        Job.load(write(folder, text), {key.replace("__", "."): value for key, value in overrides.items()})
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message.removeprefix(str(folder) + "/")


def test_the_contracts_own_example(tmp_path: Path) -> None:
    expected = "job.yaml: generation.temprature: unknown key, did you mean temperature?"
    assert refusal(tmp_path, generation__temprature=1) == expected


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("generation.max_tokens", "5", "must be an integer, got '5'"),
        ("generation.max_tokens", True, "must be an integer, got true"),
        ("generation.max_tokens", 5.0, "must be an integer"),
        ("generation.max_tokens", 0, "must be between 1 and"),
        ("generation.temperature", "0", "must be a number"),
        ("generation.temperature", float("nan"), "must be a finite number"),
        ("generation.top_p", 2, "must be between 0 and 1, got 2"),
        ("generation.min_tokens", 300, "must not exceed max_tokens"),
        ("generation.stop", "x", "must be a list"),
        ("generation.stop", [""], "must hold non-empty strings"),
        ("generation.per_row", {"n": "x"}, "must be one of max_tokens"),
        ("engine.prefix_sharing", 1, "must be true or false, got 1"),
        ("engine.memory", "8 bananas", "must be auto, a size"),
        ("engine.memory", 0, "must be auto, a size"),
        ("engine.device", "gpu", "must be auto, cpu, cuda or cuda:N"),
        ("engine.max_batch_tokens", "many", "must be an integer or auto, got 'many'"),
        ("model.dtype", "fp32", "must be auto, float32, bfloat16 or float16"),
        ("model.path", 5, "must be text"),
        ("model", "x", "must be a mapping"),
        ("inptu", 1, "unknown key, did you mean input?"),
        ("prompt.messages", [{"role": "user"}], "messages[0].content: is missing"),
        ("prompt.messages", [{"role": "user", "content": "x", "nmae": 1}], "messages[0].nmae: unknown key"),
        ("engine.speculation", "fast", "must be auto, off, ngram, suffix or layer_skip or a mapping, got 'fast'"),
        ("engine.speculation", {"kind": "fast"}, "speculation.kind: must be draft or medusa or mtp, got 'fast'"),
        ("engine.speculation", {"model": "self"}, "speculation.kind: is missing"),
        ("engine.speculation", {"kind": "medusa"}, "speculation.path: is missing"),
        (
            "engine.speculation",
            {"kind": "draft", "model": "self", "tokens": 0},
            "tokens: must be greater",
        ),
        (
            "engine.speculation",
            {"kind": "draft", "model": "self", "token": 2},
            "did you mean tokens?",
        ),
        ("run.max_failures", "1", "must be a count like 10 or a share"),
        ("run.max_failures", -1, "must be a count like 10 or a share"),
        ("run.deadline", "25:00", "must be a time like 06:00"),
        ("run.checkpoint_seconds", 0, "must be greater than 0"),
    ],
)
def test_illegal_values_are_refused_with_their_place(tmp_path: Path, key: str, value: object, words: str) -> None:
    message = refusal(tmp_path, **{key.replace(".", "__"): value})
    assert message.startswith(f"job.yaml: {key}")
    assert words in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output.order", "completion"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(tmp_path, **{key.replace(".", "__"): value})
    assert message.startswith(f"job.yaml: {key}: ")
    assert "not available yet" in message


def test_exclusive_keys(tmp_path: Path) -> None:
    assert "cannot stand beside text" in refusal(tmp_path, prompt__messages_column="chat")
    assert "none is given" in refusal(tmp_path, prompt__text=None)
    both = refusal(tmp_path, generation__choices=["a"], generation__regex="b")
    assert both == "job.yaml: generation.regex: cannot stand beside choices, keep one of them"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: 1\nmodel: 2\n", "job.yaml:2:1: not valid YAML: key 'model' stands twice"),
        ("model: {path: a\n", "job.yaml:2:1: not valid YAML"),
        ("- a\n", "a job file is a mapping"),
        ("", "a job file is a mapping"),
        ("1: 2\n", "a key must be text"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, BASE.replace("model: {path: model.gguf}", "")) == "job.yaml: model: is missing"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Job.load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        Job.load(tmp_path / "latin.yaml")


def test_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BASE.replace("path: out", 'path: "${PLACE}/out", prefix: "$${PLACE}"')
    monkeypatch.delenv("PLACE", raising=False)
    assert refusal(tmp_path, text) == "job.yaml: output.path: environment variable PLACE is not set"
    monkeypatch.setenv("PLACE", "here")
    job = Job.load(write(tmp_path, text))
    assert (job.output.path, job.output.prefix) == ("here/out", "${PLACE}")
    assert job.document["output"]["path"] == "${PLACE}/out"  # what is stored beside the output keeps secrets out


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub")
    monkeypatch.chdir(tmp_path)
    job = Job.load("sub/job.yaml")
    assert job.output_path == tmp_path / "sub" / "out"
    assert job.model_path == str(tmp_path / "sub" / "model.gguf")
    assert (job.name, job.source) == ("job", "sub/job.yaml")


def test_hub_ids_stay(tmp_path: Path) -> None:
    assert Job.load(write(tmp_path), {"model.path": "some/model"}).model_path == "some/model"


def test_overrides_reach_into_lists_and_new_sections(tmp_path: Path) -> None:
    text = BASE.replace('text: "Say {{ x }}"', "messages: [{role: user, content: a}]")
    job = Job.load(write(tmp_path, text), {"prompt.messages.0.content": "b", "run.checkpoint_seconds": 1})
    assert job.prompt.messages is not None
    assert job.prompt.messages[0].content == "b"
    assert job.run.checkpoint_seconds == 1
    with pytest.raises(UsageError, match=r"--set prompt\.messages\.3\.content: there is no '3' to set"):
        Job.load(write(tmp_path, text), {"prompt.messages.3.content": "b"})


def test_assignments_are_yaml() -> None:
    parsed = parse_assignments(["a.b=1", "c=off", "d=[x, 2.5]", "e=", "f=a=b"])
    assert parsed == {"a.b": 1, "c": "off", "d": ["x", 2.5], "e": None, "f": "a=b"}
    for text in ("a", "=1", "a..b=1", "a={", "a={{ x }}"):
        with pytest.raises(UsageError, match="--set"):
            parse_assignments([text])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("1e-4", 1e-4),
        ("06:00", "06:00"),
        ("12:30", "12:30"),
        ("0x10", 16),
        ("010", 10),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("1_000", "1_000"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


def test_the_same_values_from_file_and_python(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "generation: {max_tokens: 32, stop: [a]}\nengine: {speculation: off}\n")
    overrides = {"name": "job", "generation": {"max_tokens": 32, "stop": ["a"]}, "engine.speculation": "off"}
    other = Job.load(write(tmp_path, name="other.yaml"), overrides)
    assert Job.load(path).model_dump() == other.model_dump()


def test_allowed_failures(tmp_path: Path) -> None:
    def allowed(value: object) -> int | None:
        return Job.load(write(tmp_path), {"run.max_failures": value}).run.allowed_failures(250)

    assert [allowed(value) for value in (None, 0, 7, "1%", "0.5%", "100%")] == [None, 0, 7, 2, 1, 250]


@pytest.mark.parametrize(
    ("key", "value"),
    [("input__path", []), ("input__path", ""), ("prompt", {"messages": []}), ("output__path", ""), ("name", "")],
)
def test_what_is_empty_is_said_in_plain_words(tmp_path: Path, key: str, value: Any) -> None:
    place = "prompt.messages" if key == "prompt" else key.replace("__", ".")
    with pytest.raises(UsageError) as caught:
        make_job(tmp_path, **{key: value})
    assert str(caught.value) == f"{tmp_path / 'job.yaml'}: {place}: must not be empty"


@pytest.mark.parametrize("text", ["model: &m [*m]\n", "a: &m {b: *m}\n", f"model: {'[' * 5000}{']' * 5000}\n"])
def test_yaml_without_an_end_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"job\.yaml: not valid YAML: nested too deeply") as caught:
        Job.load(path)
    assert caught.value.exit_code == 2
