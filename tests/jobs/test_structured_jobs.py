"""Jobs whose answers have a grammar: refused before a model loads, files found, part of what makes a job."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_output, write_job, write_rows
from tiny import tiny_model

from batchgen.engine import Engine, Grammar, Request
from batchgen.jobs import Job, cli, run
from batchgen.jobs.command_preview import preview_job
from batchgen.jobs.errors import UsageError
from batchgen.jobs.fingerprint import differences, identity_of, identity_without_model
from batchgen.jobs.models import LoadedModel, Models
from batchgen.jobs.stop import Stop
from batchgen.pipeline import annotate
from batchgen.pipeline.openai_grammar import BadGrammarError
from batchgen.pipeline.openai_request import read_request

SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer", "minimum": 0, "maximum": 99}, "a": {"enum": ["x", "y"]}},
    "required": ["b", "a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama3", tmp_path_factory.mktemp("structured") / "model")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("regex", "[", "generation.regex: unclosed character class"),
        ("regex", 5, "generation.regex: must be text, got 5"),
        ("choices", [], "generation.choices: must be a list of non-empty texts, got []"),
        ("choices", ["a", 1], "generation.choices[1]: must be text, got 1"),
        ("choices", ["a", "a"], "generation.choices: 'a' is listed twice"),
        ("grammar", "start: foo", 'generation.grammar: at 1(8): unknown name: "foo"'),
        ("json_schema", {"type": "objekt"}, "generation.json_schema: Invalid type: objekt"),
        ("json_schema", {"properties": {"a": {"maxlength": 1}}}, "generation.json_schema: properties.a.maxlength:"),
        ("json_schema", {"not": {}}, "generation.json_schema: not: keyword is not supported"),
        ("json_schema", "nowhere.json", "generation.json_schema: nowhere.json: No such file"),
        ("json_schema", "bad.json", "generation.json_schema: bad.json: is not JSON"),
        ("json_schema", "list.json", "generation.json_schema: list.json: must hold a JSON object"),
        ("json_schema", "deep.json", "generation.json_schema: deep.json: is nested too deeply"),
    ],
)
def test_a_bad_grammar_is_exit_2_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, message: str
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "deep.json").write_text('{"items":' * 100_000)
    job = write_job(tmp_path, **{f"generation__{key}": value})
    assert cli.invoke(["run", str(job)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{job}: {message}")
    assert not (tmp_path / "out").exists()


ENDLESS = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generation__regex": "a{1000000}"}, r"generation\.regex: [^<>]+$"),
        ({"generation__grammar": 'start: "x"{100000}'}, r"generation\.grammar: [^<>]+$"),
        ({"generation__json_schema": {**ENDLESS, "$ref": "#/$defs/n"}}, r"generation\.json_schema: [^<>]+$"),
        (
            {
                "generation__choices": ["a", "many tokens"],
                "generation__max_tokens": 2,
                "generation__temperature": 0,
                "output__choice_probs": True,
            },
            r"generation\.max_tokens: 2, but a choice that is to be scored has \d+ tokens; raise it$",
        ),
    ],
)
def test_what_no_answer_can_be_is_exit_2_before_the_weights(
    tmp_path: Path, model: Path, settings: dict[str, Any], message: str
) -> None:
    class Unloaded(Models):
        def engine(self, job: Job) -> LoadedModel:
            raise AssertionError("the weights were loaded")

    write_rows(tmp_path, 2)
    job = make_job(tmp_path, model__path=str(model), prompt__text="Say", prompt__on_null="empty", **settings)
    with pytest.raises(UsageError, match=message) as raised:
        run(job, models=Unloaded())
    assert "\n" not in str(raised.value)


def test_a_schema_file_is_relative_to_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "schema.json").write_text(json.dumps(SCHEMA))
    monkeypatch.chdir("/")
    job = make_job(tmp_path, generation__json_schema="inner/schema.json")
    assert job.generation.structure == Grammar.json_schema(SCHEMA)
    assert job.document["generation"]["json_schema"] == "inner/schema.json"


def test_the_grammar_is_part_of_the_identity(tmp_path: Path) -> None:
    models = FakeModels()
    turned = {**SCHEMA, "properties": dict(reversed(list(SCHEMA["properties"].items())))}
    given: list[dict[str, Any]] = [
        {"choices": ["a", "b"]},
        {"choices": ["b", "a"]},
        {"regex": "a|b"},
        {"grammar": 'start: "a" | "b"'},
        {"json_schema": SCHEMA},
        {"json_schema": turned},  # another order of the properties gives other answers
        {},
    ]
    jobs = [make_job(tmp_path, **{f"generation__{key}": value for key, value in one.items()}) for one in given]
    identities = [identity_of(job, models) for job in jobs]
    for at, job in enumerate(jobs):
        assert identity_without_model(job, identities[at]) == identities[at]
        for other in range(len(jobs)):
            assert bool(differences(identities[at], identities[other])) == (at != other)
            known = identity_without_model(job, identities[other])
            assert bool(differences(identities[other], known)) == (at != other)


def test_a_job_answers_in_its_schema(tmp_path: Path, model: Path) -> None:
    write_rows(tmp_path, 5)
    job = make_job(
        tmp_path,
        model__path=str(model),
        model__dtype="float32",
        prompt__on_null="empty",
        generation={"json_schema": SCHEMA, "max_tokens": 60, "temperature": 1.5},
        engine__memory="1MiB",
    )
    assert run(job).exit_code == 0
    rows = read_output(tmp_path / "out")
    assert [row["finish_reason"] for row in rows] == ["stop"] * 5
    for row in rows:
        value = json.loads(row["completion"])
        assert list(value) == ["b", "a"]
        assert row["completion"] == json.dumps(value, separators=(",", ":"))


def test_annotate_takes_the_same_keys(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(str(model), device="cpu", dtype="float32", memory="1MiB")
    rows = Dataset.from_dict({"doc": ["the fox", "the dog", "and then"]})
    generation = {"choices": ["fox", "dog jumps"], "temperature": 0, "max_tokens": 20}
    labelled = annotate(rows, model=engine, prompt={"text": "{{ doc }}"}, generation=generation)
    assert set(labelled["completion"]) <= {"fox", "dog jumps"}
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    monkeypatch.chdir(tmp_path)
    generation = {"json_schema": "schema.json", "temperature": 0, "max_tokens": 40}
    labelled = annotate(rows, model=engine, prompt={"text": "{{ doc }}"}, generation=generation)
    assert all(json.loads(text)["a"] in "xy" for text in labelled["completion"])
    with pytest.raises(ValueError, match="unclosed character class"):
        annotate(rows, model=engine, prompt={"text": "{{ doc }}"}, generation={"regex": "["})


def answered(tmp_path: Path, model: Path, rows: int = 6, **settings: Any) -> list[dict[str, Any]]:
    write_rows(tmp_path, rows)
    job = make_job(
        tmp_path,
        model__path=str(model),
        model__dtype="float32",
        prompt__on_null="empty",
        engine__memory="1MiB",
        **settings,
    )
    assert run(job).exit_code == 0
    return read_output(tmp_path / "out")


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_parsed_answers_stand_in_a_typed_column(tmp_path: Path, model: Path, form: str) -> None:
    write_rows(tmp_path, 6)
    generation = {"json_schema": SCHEMA, "max_tokens": 60, "temperature": 1.5}
    settings = {"model__path": str(model), "model__dtype": "float32", "prompt__on_null": "empty"}
    job = make_job(tmp_path, **settings, generation=generation, output__parse=True, output__format=form)
    assert run(job).exit_code == 0
    rows = read_output(tmp_path / "out", form)
    assert [row["parsed"] for row in rows] == [json.loads(row["completion"]) for row in rows]
    assert all(row["error"] is None for row in rows)


def test_answers_that_were_cut_keep_text_and_column_type(tmp_path: Path, model: Path) -> None:
    rows = answered(tmp_path, model, generation={"json_schema": SCHEMA, "max_tokens": 4}, output__parse=True)
    for row in rows:
        assert (row["finish_reason"], row["parsed"]) == ("length", None)
        assert row["completion"].startswith('{"b"')
        assert (row["error"]["code"], row["error"]["stage"]) == ("parse", "output")
    assert manifest(tmp_path / "out")["counts"]["length"] == 6
    schema = load_from_disk(str(tmp_path / "out")).features["parsed"]
    assert {name: value.dtype for name, value in schema.items()} == {"b": "int64", "a": "string"}


def test_every_choice_has_its_probability(tmp_path: Path, model: Path) -> None:
    generation = {"choices": ["fox", "the dog", "the"], "max_tokens": 9, "temperature": 0}
    for row in answered(tmp_path, model, generation=generation, output__choice_probs=True):
        probabilities = {entry["choice"]: entry["prob"] for entry in row["choice_probs"]}
        assert list(probabilities) == generation["choices"]
        assert sum(probabilities.values()) == pytest.approx(1)
        assert row["completion"] == max(probabilities, key=lambda choice: probabilities[choice])
        assert row["finish_reason"] == "stop"
    job = make_job(tmp_path, model__path=str(model), generation=generation, output__choice_probs=True)
    shown = [line for line in preview_job(job, 2, Models()) if line.startswith("choice_probs: 'fox' 0.")]
    assert len(shown) == 2


def test_rows_that_were_cut_are_asked_again(tmp_path: Path, model: Path) -> None:
    generation = {"regex": "(a|the ){1,40}q", "max_tokens": 3, "temperature": 2.0}
    once = answered(tmp_path, model, 22, generation=generation)
    answered(tmp_path, model, 22, generation=generation, output__path="again", run__retries=3)
    rows = read_output(tmp_path / "again")
    assert {row["attempts"] for row in rows} >= {1, 2, 4}
    assert sum(row["completion"] != first["completion"] for first, row in zip(once, rows, strict=True)) > 5
    for first, row in zip(once, rows, strict=True):
        assert (row["attempts"] == 1) == (first["finish_reason"] == "stop")
        assert row["attempts"] > 1 or row["completion"] == first["completion"]
        assert row["finish_reason"] == "stop" or row["attempts"] == 4


def test_a_run_that_was_stopped_asks_again_as_one_that_was_not(tmp_path: Path) -> None:
    """The fake engine answers by prompt, seed and row alone; the second run finds what the first one left."""
    write_rows(tmp_path, 40)
    settings = {"prompt__on_null": "empty", "run__retries": 2, "generation": {"max_tokens": 8}}
    whole = make_job(tmp_path, **settings)
    assert run(whole, models=FakeModels()).exit_code == 0
    interrupted = make_job(tmp_path, **settings, output__path="stopped")
    stop = Stop()

    def interrupt(request: Request) -> None:
        stop.reason = "interrupted" if request.key == 21 else stop.reason

    fake = FakeEngine(before=interrupt)
    assert run(interrupted, models=FakeModels(fake), stop=stop).stopped
    assert run(interrupted, models=FakeModels()).exit_code == 0
    rows = read_output(tmp_path / "out")
    assert read_output(tmp_path / "stopped") == rows
    assert {row["attempts"] for row in rows} == {1, 2, 3}


def test_retries_that_come_or_go_are_named(tmp_path: Path) -> None:
    write_rows(tmp_path, 2)
    job = make_job(tmp_path, run__retries=1, generation={"max_tokens": 8})
    assert run(job, models=FakeModels()).exit_code == 0
    with pytest.raises(UsageError, match=r"different job \(run\.retries: was .*, is absent\)"):
        run(make_job(tmp_path, generation={"max_tokens": 8}), models=FakeModels())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output__parse": True}, "output.parse: needs generation.json_schema"),
        ({"output__choice_probs": True, "generation": {"regex": "a"}}, "output.choice_probs: needs generation.choices"),
        (
            {"output__parse": True, "generation": {"json_schema": SCHEMA}, "output__format": "openai"},
            "output.parse: output.format: openai has no such column",
        ),
        (
            {"output__choice_probs": True, "generation": {"choices": ["a"], "max_tokens": 5}},
            "output.choice_probs: needs temperature 0",
        ),
        (
            {"output__choice_probs": True, "generation": {"choices": ["a"], "temperature": 0, "logprobs": 1}},
            "output.choice_probs: cannot stand beside logprobs; change generation, or leave choice_probs out",
        ),
        ({"run__retries": 1, "generation": {"temperature": 0}}, "run.retries: at temperature 0 every attempt"),
    ],
)
def test_what_does_not_go_together_is_exit_2(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_rows(tmp_path, 2)
    with pytest.raises(UsageError, match=re.escape(message)):
        run(make_job(tmp_path, **settings), models=FakeModels())


def test_parsed_and_probabilities_from_python(model: Path) -> None:
    engine = Engine.load(str(model), device="cpu", dtype="float32", memory="1MiB")
    rows = Dataset.from_dict({"doc": ["the fox", "the dog"]})
    prompt = {"text": "{{ doc }}"}
    found = annotate(
        rows, model=engine, prompt=prompt, generation={"json_schema": SCHEMA, "max_tokens": 60}, parse=True
    )
    assert [json.loads(text) for text in found["completion"]] == list(found["parsed"])
    generation = {"choices": ["fox", "dog"], "temperature": 0, "max_tokens": 9}
    found = annotate(rows, model=engine, prompt=prompt, generation=generation, choice_probs=True)
    assert all(len(entry) == 2 for entry in found["choice_probs"])
    with pytest.raises(ValueError, match="parse: needs json_schema"):
        annotate(rows, model=engine, prompt=prompt, generation=generation, parse=True)
    with pytest.raises(ValueError, match="already; set prefix"):
        annotate(
            Dataset.from_dict({"parsed": ["x"]}),
            model=engine,
            prompt={"text": "a"},
            generation={"json_schema": SCHEMA},
            parse=True,
        )


FORMATS = [
    ({"response_format": {"type": "json_object"}}, Grammar.json_schema({"type": "object"})),
    ({"response_format": {"type": "text"}}, None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        Grammar.json_schema(SCHEMA),
    ),
    ({"guided_choice": ["a", "b"]}, Grammar.choices(["a", "b"])),
    ({"guided_regex": "a+"}, Grammar.regex("a+")),
    ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
    ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
    ({"structured_outputs": {"choice": ["a"], "json": None}}, Grammar.choices(["a"])),
]


@pytest.mark.parametrize(("body", "grammar"), FORMATS, ids=lambda part: str(part)[:40])
def test_a_line_of_a_batch_file_asks_for_its_form(body: dict[str, Any], grammar: Grammar | None) -> None:
    row = {"method": "POST", "url": "/v1/completions", "body": json.dumps({"prompt": "a", **body})}
    assert read_request(row).sampling.get("grammar") == grammar


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"guided_regex": "["}, "guided_regex: unclosed character class"),
        ({"response_format": {"type": "json_schema"}}, "response_format: is not as the API describes it"),
        ({"response_format": 3}, "response_format: is not as the API describes it"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex: only one form can be asked for"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs: must have exactly one of"),
        ({"guided_json": {"not": {}}}, "guided_json: not: keyword is not supported"),
    ],
)
def test_a_form_that_is_none_is_that_lines_error(body: dict[str, Any], message: str) -> None:
    row = {"method": "POST", "url": "/v1/completions", "body": json.dumps({"prompt": "a", **body})}
    with pytest.raises(BadGrammarError, match=re.escape(message)):
        read_request(row)


def test_a_job_from_python_without_a_file_refuses_too(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    with pytest.raises(UsageError, match=r"generation\.regex: unclosed group"):
        Job.load(path, {"generation.regex": "(a"})
