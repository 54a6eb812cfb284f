"""Jobs of several steps: each over the same rows, later templates seeing earlier answers, each row every step once."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_models import FakeEngine, FakeModels
from job_files import make_job, manifest, read_output, visible, write_job, write_rows

from batchgen.engine.request import Request
from batchgen.engine.spec import ModelSpec, RopeSpec
from batchgen.jobs import Job, run
from batchgen.jobs.check import check_job
from batchgen.jobs.command_plan import plan_job
from batchgen.jobs.command_preview import preview_job
from batchgen.jobs.command_push import PushOptions, push_output
from batchgen.jobs.command_report import render
from batchgen.jobs.errors import UsageError
from batchgen.jobs.findings import read_findings
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.status import describe_status, read_status
from batchgen.pipeline.place import place

ROPE = RopeSpec("default", 1e5, 64, 8192)
SPEC = ModelSpec("llama", 49152, 8192, 576, 1536, 30, 9, 3, 64, 1e-5, ROPE, (None,) * 30, tied=True)
OUTLINE = {"name": "outline", "prompt": {"text": "Outline {{ word }}"}}
REVIEW = {
    "name": "review",
    "prompt": {"text": "Review {{ outline_completion }} of {{ word }}"},
    "generation": {"max_tokens": 9},
}
STEPS: list[dict[str, Any]] = [OUTLINE, REVIEW]


def chain(folder: Path, steps: list[dict[str, Any]] | None = None, **overrides: Any) -> Job:
    return make_job(folder, prompt=None, steps=STEPS if steps is None else steps, **overrides)


def asked(models: FakeModels) -> list[str]:
    """The first words of the prompts that were asked."""
    return models.fake.prompts  # type: ignore[attr-defined, no-any-return]


def watching(before: Any = lambda request: None) -> FakeModels:
    """Keeps the prompts that are asked."""
    prompts: list[str] = []

    def note(request: Request) -> None:
        prompts.append(bytes(request.prompt).decode())
        before(request)

    models = FakeModels(FakeEngine(before=note))
    models.fake.prompts = prompts  # type: ignore[attr-defined]
    return models


@pytest.mark.parametrize("form", ["arrow", "parquet", "jsonl"])
def test_a_later_step_reads_what_an_earlier_one_answered(tmp_path: Path, form: str) -> None:
    write_rows(tmp_path, 20)
    models = watching()
    report = run(chain(tmp_path, output__format=form), models=models)
    rows = read_output(tmp_path / "out", form)
    assert [row["nested"]["list"][0] for row in rows] == list(range(20))
    good = [row for row in rows if row["word"] is not None]
    reviews = {prompt for prompt in asked(models) if prompt.startswith("Review")}
    assert reviews == {f"Review {row['outline_completion']} of {row['word']}" for row in good}
    assert models.loads == 1
    for row in rows:
        failed = row["word"] is None
        assert (row["outline_completion"] is None) == (row["review_completion"] is None) == failed
        assert (row["outline_error"] is not None) == (row["review_error"] is not None) == failed
    assert max(len(row["outline_completion"]) for row in good) == 12
    assert max(len(row["review_completion"]) for row in good) == 9
    assert report.steps["outline"]["error"] == report.steps["review"]["error"] == 2
    assert (report.asked, report.exit_code) == (40, 0)
    again = watching()
    assert run(chain(tmp_path, output__format=form), models=again).asked == 0
    assert again.loads == 0


def test_a_row_without_an_earlier_answer_follows_the_policy_of_the_step(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    review = {**REVIEW, "prompt": {"text": "Review {{ outline_completion }}", "on_null": "skip"}}
    third = {"prompt": {"text": "Third {{ review_completion }} {{ word }}"}}
    report = run(chain(tmp_path, [OUTLINE, review, third]), models=FakeModels())
    rows = read_output(tmp_path / "out")
    assert [row["nested"]["list"][0] for row in rows] == [at for at in range(12) if at != 5]
    assert all(row["step3_completion"] for row in rows)
    assert [counts["skipped"] for counts in report.steps.values()] == [0, 1, 1]
    assert manifest(tmp_path / "out")["skipped"] == [5]
    empty = {**REVIEW, "prompt": {"text": "Review {{ outline_completion }}", "on_null": "empty"}}
    run(chain(tmp_path, [OUTLINE, empty], output__path="other"), models=FakeModels())
    row = read_output(tmp_path / "other")[5]
    assert row["outline_error"]["code"] == "null_value"
    assert row["review_completion"]


def test_noise_belongs_to_the_row_of_the_input_whatever_was_skipped_before(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    plain = {"name": "plain", "prompt": {"text": "Plain {{ nested.name }}"}}
    run(chain(tmp_path, [{**OUTLINE, "prompt": {**OUTLINE["prompt"], "on_null": "skip"}}, plain]), models=FakeModels())  # type: ignore[dict-item]
    run(make_job(tmp_path, prompt__text="Plain {{ nested.name }}", output__path="alone"), models=FakeModels())
    alone = {row["nested"]["list"][0]: row["completion"] for row in read_output(tmp_path / "alone")}
    rows = read_output(tmp_path / "out")
    assert len(rows) == 11
    assert all(row["plain_completion"] == alone[row["nested"]["list"][0]] for row in rows)


def test_new_rows_go_through_all_steps_and_old_ones_stay(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    run(chain(tmp_path), models=FakeModels())
    old = read_output(tmp_path / "out")
    write_rows(tmp_path, 9, start=20, mode="a")
    models = watching()
    report = run(chain(tmp_path), models=models)
    assert report.asked == 18
    assert len(asked(models)) == 2 * sum(1 for at in range(20, 29) if at % 11 != 5)
    assert read_output(tmp_path / "out")[:20] == old
    run(chain(tmp_path, output__path="whole"), models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")


def test_a_limit_that_is_raised_asks_the_rest(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    assert run(chain(tmp_path, input__limit=6), models=FakeModels()).asked == 12
    assert len(read_output(tmp_path / "out")) == 6
    assert run(chain(tmp_path).with_limit(4), models=FakeModels()).asked == 0
    assert len(read_output(tmp_path / "out")) == 6
    assert run(chain(tmp_path), models=FakeModels()).asked == 28
    run(chain(tmp_path, output__path="whole"), models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")


def broken_on(words: str) -> FakeModels:
    """The device is gone as soon as a prompt holds these words."""

    def before(request: Request) -> None:
        if words in bytes(request.prompt).decode():
            raise RuntimeError("the device is gone")

    return watching(before)


def test_a_run_goes_on_in_the_middle(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(chain(tmp_path), models=broken_on("of word 12"))
    assert visible(tmp_path / "out") == []
    assert manifest(tmp_path / "out")["state"] == "failed"
    models = watching()
    run(chain(tmp_path), models=models)
    assert not [prompt for prompt in asked(models) if prompt.startswith("Outline")]
    assert 0 < len(asked(models)) < 18
    run(chain(tmp_path, output__path="whole"), models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")


def retry(words: str) -> RunOptions:
    return RunOptions(retry=parse_retry(words))


def test_later_steps_ask_again_what_reads_a_changed_answer_and_nothing_else(tmp_path: Path) -> None:
    write_rows(tmp_path, 30)
    run(chain(tmp_path), models=FakeModels())
    old = read_output(tmp_path / "out")
    longer = [{**OUTLINE, "generation": {"max_tokens": 14}}, REVIEW]
    models = watching()
    run(chain(tmp_path, longer), retry("length"), models)
    rows = read_output(tmp_path / "out")
    changed = [at for at in range(30) if rows[at]["outline_completion"] != old[at]["outline_completion"]]
    assert 0 < len(changed) < 20
    reviews = {prompt for prompt in asked(models) if prompt.startswith("Review")}
    for at in range(30):
        prompt = f"Review {rows[at]['outline_completion']} of {rows[at]['word']}"
        cut = old[at]["review_finish_reason"] == "length"
        assert (prompt in reviews) == (at in changed or cut)
        assert at in changed or cut or rows[at]["review_completion"] == old[at]["review_completion"]
    run(chain(tmp_path, longer, output__path="whole"), models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")
    assert run(chain(tmp_path, longer), models=FakeModels()).asked == 0


def test_an_answer_that_no_later_step_reads_is_new_in_the_output_all_the_same(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    aside = {"name": "aside", "prompt": {"text": "Aside {{ nested.name }}"}, "generation": {"max_tokens": 40}}
    run(chain(tmp_path, [OUTLINE, aside], generation__max_tokens=4), models=FakeModels())
    old = read_output(tmp_path / "out")
    steps = [{**OUTLINE, "generation": {"max_tokens": 30}}, aside]
    models = watching()
    run(chain(tmp_path, steps, generation__max_tokens=4), retry("length"), models)
    assert not [prompt for prompt in asked(models) if prompt.startswith("Aside")]
    rows = read_output(tmp_path / "out")
    assert [row["outline_completion"] for row in rows] != [row["outline_completion"] for row in old]
    assert [row["aside_completion"] for row in rows] == [row["aside_completion"] for row in old]
    assert not any(row["outline_finish_reason"] == "length" for row in rows)


def test_a_row_that_had_no_answer_comes_back_when_it_has_one(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    review = {**REVIEW, "prompt": {"text": "Review {{ outline_completion }}", "on_null": "skip"}}
    third = {"name": "third", "prompt": {"text": "Third {{ nested.name }}"}}
    numeric = FakeModels(FakeEngine())
    numeric.fake._complete = failing_at(numeric.fake, 3)  # type: ignore[method-assign]
    job = chain(tmp_path, [OUTLINE, review, third])
    run(job, models=numeric)
    assert len(read_output(tmp_path / "out")) == 10
    report = run(job, retry("errors"), FakeModels())
    assert report.steps["third"]["skipped"] == 1
    rows = read_output(tmp_path / "out")
    assert [row["nested"]["list"][0] for row in rows] == [at for at in range(12) if at != 5]
    run(chain(tmp_path, [OUTLINE, review, third], output__path="whole"), models=FakeModels())
    assert rows == read_output(tmp_path / "whole")


def failing_at(engine: FakeEngine, position: int) -> Any:
    from dataclasses import replace

    from batchgen.engine.request import RowError

    complete = engine._complete

    def broken(request: Request) -> Any:
        wrong = request.key == position and request.error is None and bytes(request.prompt).startswith(b"Outline")
        return complete(replace(request, error=RowError("numeric", "generate", "NaN"))) if wrong else complete(request)

    return broken


def test_fresh_starts_over_all_steps(tmp_path: Path) -> None:
    write_rows(tmp_path, 6)
    run(chain(tmp_path), models=FakeModels())
    other = [{**OUTLINE, "prompt": {"text": "Otherwise {{ word }}"}}, REVIEW]
    with pytest.raises(UsageError, match=r"step outline: prompt\.text: was .Outline .* --fresh"):
        run(chain(tmp_path, other), models=FakeModels())
    models = watching()
    run(chain(tmp_path, other), RunOptions(fresh=True), models)
    assert len(asked(models)) == 10
    steps = sorted(path.name for path in (tmp_path / "out/__batchgen__/steps").iterdir())
    assert steps == ["01-outline"]


def test_what_belongs_to_another_job_is_told_by_step(tmp_path: Path) -> None:
    write_rows(tmp_path, 6)
    run(chain(tmp_path), models=FakeModels())
    before = (tmp_path / "out/__batchgen__/steps/01-outline/__batchgen__/manifest.json").read_bytes()
    changed = [OUTLINE, {**REVIEW, "prompt": {"text": "Judge {{ outline_completion }}"}}]
    for job, words in (
        (chain(tmp_path, changed), r"\(step review: prompt\.text: was"),
        (chain(tmp_path, generation__seed=4), r"\(generation\.seed: was 0, is 4\)"),
        (chain(tmp_path, [OUTLINE, {**REVIEW, "name": "judge"}]), r"step judge: step\.name: was .review., is .judge."),
        (chain(tmp_path, [*STEPS, {"prompt": {"text": "Third"}}]), r"step\.name: was .review., is .step3."),
        (make_job(tmp_path, prompt__text=REVIEW["prompt"]["text"]), r"step: was .*, is absent"),
    ):
        with pytest.raises(UsageError, match=words):
            run(job, models=FakeModels()) if job.steps else check_output_of(job)
    assert (tmp_path / "out/__batchgen__/steps/01-outline/__batchgen__/manifest.json").read_bytes() == before
    assert run(chain(tmp_path), models=FakeModels()).asked == 0


def check_output_of(job: Job) -> None:
    from batchgen.jobs.check import check_output

    check_output(job, FakeModels())


def test_rows_that_fail_in_any_step_count_for_max_failures(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    review = {**REVIEW, "prompt": {"text": "Review {{ nested.name }}"}}
    report = run(chain(tmp_path, [OUTLINE, review], run__max_failures=0), models=FakeModels())
    assert report.counts["error"] == 0
    assert (report.exit_code, report.too_many_failures) == (3, True)
    assert run(chain(tmp_path, [OUTLINE, review], run__max_failures=0), models=FakeModels()).exit_code == 3
    assert run(chain(tmp_path, [OUTLINE, review], run__max_failures=1), models=FakeModels()).exit_code == 0


def test_a_deadline_holds_for_all_steps_together(tmp_path: Path) -> None:
    from batchgen.jobs.stop import Stop

    write_rows(tmp_path, 20)
    stop = Stop()

    def before(request: Request) -> None:
        if bytes(request.prompt).startswith(b"Review"):
            stop.reason = "deadline"

    job = chain(tmp_path, run__on_finish=f"cat > {tmp_path}/told.json")
    report = run(job, models=watching(before), stop=stop)
    assert (report.exit_code, report.stopped) == (4, "deadline")
    assert "in step 2/2 review" in report.summary()
    assert manifest(tmp_path / "out")["state"] == "stopped"
    assert run(chain(tmp_path), models=FakeModels()).exit_code == 0
    run(chain(tmp_path, output__path="whole"), models=FakeModels())
    assert read_output(tmp_path / "out") == read_output(tmp_path / "whole")


def test_the_hook_is_told_once_of_all_steps(tmp_path: Path) -> None:
    write_rows(tmp_path, 6)
    job = chain(tmp_path, run__on_finish=f"sh -c 'cat >> {tmp_path}/told.json'", run__price_per_hour=1.0)
    report = run(job, models=FakeModels())
    told = json.loads((tmp_path / "told.json").read_text())
    assert [step["name"] for step in told["steps"]] == ["outline"]
    assert told["steps"][0]["counts"]["error"] == 1
    tokens = [told["tokens"], told["steps"][0]["tokens"]]
    assert report.tokens == {name: sum(kinds[name] for kinds in tokens) for name in tokens[0]}


def test_only_the_listed_input_columns_and_all_answers_are_carried(tmp_path: Path) -> None:
    write_rows(tmp_path, 3)
    run(chain(tmp_path, output__columns=["word"]), models=FakeModels())
    names = list(read_output(tmp_path / "out")[0])
    results = ("completion", "finish_reason", "usage", "error")
    assert names == ["word", *(f"{step}_{name}" for step in ("outline", "review") for name in results)]


def test_parsed_answers_are_values_for_later_steps(tmp_path: Path) -> None:
    write_rows(tmp_path, 4)
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"],
              "additionalProperties": False}  # fmt: skip
    first = {
        "name": "facts",
        "prompt": {"text": "Say {{ word }}"},
        "generation": {"json_schema": schema},
        "parse": True,
    }
    second = {"name": "use", "prompt": {"text": "Use {{ facts_parsed.title }}", "on_null": "skip"}, "prefix": ""}
    run(chain(tmp_path, [first, second], output__path="raw"), models=FakeModels())  # letters are no JSON
    assert read_output(tmp_path / "raw") == []
    models = watching()
    models.fake._complete = saying(models.fake, '{"title":"T"}')  # type: ignore[method-assign]
    run(chain(tmp_path, [first, second]), models=models)
    rows = read_output(tmp_path / "out")
    assert rows[0]["facts_parsed"] == {"title": "T"}
    assert {prompt for prompt in asked(models) if prompt.startswith("Use")} == {"Use T"}
    assert all(row["completion"] for row in rows)


def saying(engine: FakeEngine, text: str) -> Any:
    from dataclasses import replace

    from batchgen.engine.request import Sample

    complete = engine._complete

    def wrapped(request: Request) -> Any:
        completion = complete(request)
        if completion.error is not None or not bytes(request.prompt).startswith(b"Say"):
            return completion
        return replace(completion, samples=(Sample([*text.encode(), 256], "stop"),))

    return wrapped


def test_a_job_of_one_step(tmp_path: Path) -> None:
    write_rows(tmp_path, 4)
    run(chain(tmp_path, [OUTLINE]), models=FakeModels())
    assert read_output(tmp_path / "out")[0]["outline_completion"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": {"text": "x"}}, "prompt: cannot stand beside steps"),
        ({"output__prefix": "a_"}, r"output\.prefix: with steps"),
        ({"output__parse": True}, r"output\.parse: with steps"),
        ({"output__format": "openai"}, r"output\.format: openai holds one answer per row"),
        ({"input__format": "openai"}, "steps: the lines of an OpenAI batch file"),
        ({"steps": [OUTLINE, {"name": "2", "prompt": {"text": "x"}}]}, r"steps\[1\]\.name: must be a letter"),
        ({"steps": [OUTLINE, OUTLINE]}, "steps: two steps have the name 'outline'"),
        ({"steps": [OUTLINE, {**REVIEW, "prefix": "outline_"}]}, "steps: two steps have the prefix 'outline_'"),
        ({"steps": [OUTLINE, {"name": "x"}]}, r"steps\[1\]\.prompt: is missing"),
        ({"steps": [{"prompt": {"txt": "x"}}]}, r"steps\[0\]\.prompt\.txt: unknown key, did you mean text\?"),
        ({"steps": [{**OUTLINE, "generation": {"max_token": 3}}]}, r"steps\[0\]\.generation\.max_token: unknown key"),
        ({"steps": [{**OUTLINE, "parse": True}]}, r"steps\[0\]: output\.parse: needs generation\.json_schema"),
        ({"steps": []}, "prompt: is missing"),
        (
            {"generation__regex": "a", "steps": [{**OUTLINE, "generation": {"choices": ["b"]}}]},
            r"steps\[0\]: .*cannot stand beside",
        ),
    ],
)
def test_what_a_job_file_cannot_say(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_rows(tmp_path, 3)
    arguments = {"prompt": None, "steps": STEPS, **change}
    with pytest.raises(UsageError, match=words):
        make_job(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([REVIEW, OUTLINE], r"step 1/2 review: prompt: the input has no column 'outline_completion', only word"),
        (
            [OUTLINE, {"prompt": {"text": "{{ outline_answer }}"}}],
            r"step 2/2 step2: .* no column 'outline_answer', only",
        ),
        ([{**OUTLINE, "prefix": "wo"}, {"prompt": {"text": "{% if %}"}}], r"step 2/2 step2: prompt\.text: line 1"),
        (
            [{**OUTLINE, "name": "word", "prompt": {"text": "x"}, "prefix": ""}, REVIEW],
            "no column 'outline_completion'",
        ),
        (
            [{"prompt": {"text": "x"}, "generation": {"max_tokens": 600}}],
            r"step 1/1 step1: generation\.max_tokens: 600",
        ),
    ],
)
def test_check_looks_at_every_step(tmp_path: Path, steps: list[dict[str, Any]], words: str) -> None:
    write_rows(tmp_path, 3)
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match=words):
        check_job(chain(tmp_path, steps, model__path="./model"), FakeModels())


def test_a_result_column_that_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"word": "a", "outline_error": 1}\n')
    with pytest.raises(UsageError, match=r"step 1/2 outline: .* 'outline_error' .* another prefix"):
        check_job(chain(tmp_path, output__columns=["word"]), FakeModels())


def test_check_tells_what_each_step_uses_and_adds(tmp_path: Path) -> None:
    write_rows(tmp_path, 3)
    lines = check_job(chain(tmp_path), FakeModels())
    assert "step 1/2 outline uses: word; adds outline_completion, outline_finish_reason" in "\n".join(lines)
    assert "step 2/2 review uses: outline_completion, word; adds review_completion" in "\n".join(lines)
    run(chain(tmp_path), models=FakeModels())
    assert check_job(chain(tmp_path), FakeModels())[0].endswith(": ok")


def test_overrides_reach_a_step(tmp_path: Path) -> None:
    path = write_job(tmp_path, prompt=None, steps=STEPS)
    job = Job.load(path, {"steps.1.generation.max_tokens": 5, "generation.seed": 3})
    assert [step.generation.max_tokens for step in job.chain] == [12, 5]
    assert {step.generation.seed for step in job.chain} == {3}


def test_status_tells_how_far_each_step_is(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(chain(tmp_path), models=broken_on("Outline word 13"))
    status = read_status(tmp_path / "out")
    assert (status.state, status.done) == ("failed", 0)
    assert 0 < status.steps[0].done < 20
    assert "the device is gone" in (status.last_error or "")
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(chain(tmp_path), models=broken_on("of word 13"))
    status = read_status(tmp_path / "out")
    assert [(step.name, step.state) for step in status.steps] == [("outline", "finished"), ("review", "failed")]
    assert 0 < status.done < 20
    assert "step 1/2 outline: 20 of 20 done, 2 failed, 0 skipped, 0 left" in list(describe_status(status))
    run(chain(tmp_path), models=FakeModels())
    assert read_status(tmp_path / "out").state == "finished"
    assert [step.left for step in read_status(tmp_path / "out").steps] == [0, 0]
    assert read_status(tmp_path / "out" / "__batchgen__" / "steps" / "01-outline").done == 20


def test_plan_is_that_of_the_first_step(tmp_path: Path) -> None:
    write_rows(tmp_path, 20)
    models = FakeModels()
    models.spec = lambda job: SPEC  # type: ignore[method-assign]
    lines = list(plan_job(chain(tmp_path), models))
    assert lines[0] == "step 1/2 outline: the plan is that of this step"
    assert lines[-1] == "step 2/2 review: its prompts depend on answers; at most 9 answer tokens a row"
    figures = json.loads(next(plan_job(chain(tmp_path), models, as_json=True)))
    assert (figures["step"], figures["later_steps"]) == ("outline", ["review"])
    plain = json.loads(next(plan_job(make_job(tmp_path, prompt__text="Outline {{ word }}"), models, as_json=True)))
    assert figures["prompt_tokens"] == plain["prompt_tokens"]


def test_preview_shows_every_step_with_the_answers_it_reads(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    review = {**REVIEW, "prompt": {"text": "Review {{ outline_completion }}", "on_null": "skip"}}
    lines = list(preview_job(chain(tmp_path, [OUTLINE, review]), 7, FakeModels()))
    [at] = [at for at, line in enumerate(lines) if line == "=== step 2/2 review"]
    assert lines[0] == "=== step 1/2 outline"
    assert "skipped: column 'outline_completion' is null" in lines[at:]
    answers = [lines[place + 1] for place, line in enumerate(lines[:at]) if line.startswith("answer")]
    prompts = [line for line in lines[at:] if line.startswith("Review ")]
    assert prompts == [f"Review {answer}" for answer in answers]
    run(chain(tmp_path, [OUTLINE, review]).with_limit(7), models=FakeModels())
    assert answers == [row["outline_completion"] for row in read_output(tmp_path / "out")]


def test_the_report_has_a_line_for_each_step(tmp_path: Path) -> None:
    write_rows(tmp_path, 12)
    review = {**REVIEW, "prompt": {"text": "Review {{ nested.name }}"}}
    run(chain(tmp_path, [OUTLINE, review]), models=FakeModels())
    page = render(read_findings(tmp_path / "out"))
    text = " ".join(re.sub(r"<[^>]*>", " ", page.split("Steps (everything")[1][:3000]).split())
    counts = read_status(tmp_path / "out").steps[0].counts
    assert f"outline 12 {counts['stop']} {counts['length']} 1 0" in text


def test_the_card_shows_the_steps(tmp_path: Path) -> None:
    write_rows(tmp_path, 3)
    run(chain(tmp_path), models=FakeModels())
    card = "\n".join(push_output(tmp_path / "out", "org/name", PushOptions(dry_run=True)))
    assert "## Steps" in card
    assert "Review {{ outline_completion }} of {{ word }}" in card
    assert "01-outline" not in card


def test_the_example_is_valid() -> None:
    example = Path(__file__).parents[2] / "examples" / "two-steps" / "job.yaml"
    lines = check_job(Job.load(example), FakeModels())
    assert any(line.startswith("step 2/2 topic uses: summary_completion") for line in lines)


def test_steps_in_a_store(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    name = f"memory://steps-{tmp_path.name}/out"
    run(chain(tmp_path, output__path=name, output__format="jsonl"), models=FakeModels())
    write_rows(tmp_path, 3, start=8, mode="a")
    run(chain(tmp_path, output__path=name, output__format="jsonl"), models=FakeModels())
    run(chain(tmp_path, output__path="whole", output__format="jsonl"), models=FakeModels())
    written = place(name, tmp_path) / "data.jsonl"
    assert written.read_bytes() == (tmp_path / "whole" / "data.jsonl").read_bytes()
