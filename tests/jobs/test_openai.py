"""OpenAI batch files in and out: a file written for a hosted batch API runs unchanged, line by line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_models import ByteTokenizer, FakeEngine, FakeModels
from job_files import make_job, manifest, read_output, visible, write_job, write_rows
from openai_files import chat_line, read_lines, text_line, write_lines

from batchgen.engine.request import Completion, Request, RowError
from batchgen.jobs import Job, run
from batchgen.jobs.check import check_job
from batchgen.jobs.errors import UsageError
from batchgen.jobs.outcomes import parse_retry
from batchgen.jobs.run import RunOptions
from batchgen.jobs.status import read_status
from batchgen.pipeline.rows import InputError

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


class ChatTokenizer(ByteTokenizer):
    chat_template = TEMPLATE


def models(engine: FakeEngine | None = None, **more: Any) -> FakeModels:
    return FakeModels(engine or FakeEngine(tokenizer=ChatTokenizer()), **more)


def job_of(folder: Path, **more: Any) -> Job:
    settings = {"input__path": "batch.jsonl", "input__format": "openai", "prompt": None, "output__format": "openai"}
    return make_job(folder, **{**settings, **more})


def requests_of(folder: Path, lines: list[Any], **more: Any) -> dict[int, Request]:
    """What the engine was asked, by position."""
    seen: dict[int, Request] = {}
    write_lines(folder, lines)
    engine = FakeEngine(tokenizer=ChatTokenizer(), before=lambda request: seen.update({request.key: request}))
    run(job_of(folder, **more), models=models(engine))
    return seen


def failures_of(folder: Path, lines: list[Any], **more: Any) -> list[dict[str, Any]]:
    write_lines(folder, lines)
    run(job_of(folder, **more), models=models())
    return read_lines(folder / "out")[1]


def test_a_chat_and_a_text_are_answered_in_the_shapes_of_their_endpoints(tmp_path: Path) -> None:
    write_lines(tmp_path, [chat_line("a", max_tokens=40), text_line("b", max_tokens=2)])
    report = run(job_of(tmp_path), models=models())
    assert report.exit_code == 0
    assert visible(tmp_path / "out") == ["errors.jsonl", "output.jsonl"]
    (chat, text), failures = read_lines(tmp_path / "out")
    assert failures == []
    assert (chat["custom_id"], chat["error"], chat["response"]["status_code"]) == ("a", None, 200)
    body = chat["response"]["body"]
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", "fake/model", "chatcmpl-")
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["message"]["content"].isalpha()
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["logprobs"]) == ("stop", None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert usage["prompt_tokens"] == len("<user>Say hi")
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    body = text["response"]["body"]
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    assert body["choices"][0] == {
        "index": 0,
        "text": body["choices"][0]["text"],
        "logprobs": None,
        "finish_reason": "length",
    }
    assert len(body["choices"][0]["text"]) == 2
    assert len({chat["id"], text["id"]}) == 2
    assert manifest(tmp_path / "out")["counts"] == {"rows": 2, "stop": 1, "length": 1, "error": 0, "skipped": 0}


def test_body_parameters_override_the_jobs(tmp_path: Path) -> None:
    lines = [
        chat_line("0"),
        chat_line(
            "1", temperature=0, top_p=0.5, seed=7, max_tokens=3, stop="x", presence_penalty=1, frequency_penalty=2
        ),
        chat_line("2", max_tokens=3, max_completion_tokens=5, n=2, logprobs=True, top_logprobs=2),
        chat_line("3", logprobs=True, stop=["a", "b"], top_k=-1, min_p=0.1, repetition_penalty=1.5, min_tokens=1),
        text_line(
            "4", ["one prompt"], logprobs=3, ignore_eos=True, include_stop_str_in_output=True, stop_token_ids=[5]
        ),
        chat_line(
            "5", temperature=None, stop=None, stream=False, tools=[], logit_bias={}, user="u", metadata={"a": "b"}
        ),
        chat_line("6", max_completion_tokens=4),
    ]
    seen = requests_of(tmp_path, lines, generation__seed=3, generation__max_tokens=9, generation__top_k=11)
    base = seen[0].sampling
    assert (base.max_tokens, base.seed, base.top_k, base.n, base.logprobs) == (9, 3, 11, 1, None)
    assert seen[1].sampling == replace(
        base, temperature=0, top_p=0.5, seed=7, max_tokens=3, stop=("x",), presence_penalty=1, frequency_penalty=2
    )
    assert seen[2].sampling == replace(base, max_tokens=5, n=2, logprobs=2)
    assert seen[3].sampling == replace(
        base, logprobs=0, stop=("a", "b"), top_k=0, min_p=0.1, repetition_penalty=1.5, min_tokens=1
    )
    assert seen[4].sampling == replace(base, logprobs=3, ignore_eos=True, include_stop=True, stop_token_ids=(5,))
    assert bytes(seen[4].prompt) == b"one prompt"
    assert seen[5].sampling == base
    assert seen[6].sampling.max_tokens == 4


def test_parts_of_text_and_the_developer_role_are_chats_as_templates_know_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    line = chat_line("a", parts)
    line["body"]["messages"].insert(0, {"role": "developer", "content": "Be brief."})
    assert bytes(requests_of(tmp_path, [line])[0].prompt) == b"<system>Be brief.<user>one two"


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({**chat_line("x"), "url": "/v1/embeddings"}, "url: must be /v1/chat/completions or /v1/completions", "url"),
    ({**chat_line("x"), "method": "GET"}, "method: must be POST, got 'GET'", "method"),
    ({**chat_line("x"), "body": [1]}, "body: must be an object", "body"),
    (chat_line("x", tools=[{"type": "function"}]), "tools: is not supported as", "tools"),
    (chat_line("x", stream=True), "stream: is not supported as true", "stream"),
    (chat_line("x", wonder=1), "wonder: is not supported", "wonder"),
    (chat_line("x", prompt="both"), "prompt: is not supported", "prompt"),
    (chat_line("x", temperature=-1), "temperature: must be between 0 and 100", "temperature"),
    (chat_line("x", temperature="hot"), "temperature: must be a number", "temperature"),
    (chat_line("x", temperature=True), "temperature: must be a number", "temperature"),
    (chat_line("x", n=[2]), "n: must be an integer", "n"),
    (chat_line("x", seed=-5), "seed: must be between 0", "seed"),
    (chat_line("x", logprobs=2), "logprobs: must be true or false", "logprobs"),
    (chat_line("x", top_logprobs=2), "top_logprobs: needs logprobs: true", "top_logprobs"),
    (
        chat_line("x", response_format={"type": "xml"}),
        "response_format: type must be text, json_object or json_schema, got 'xml'",
        "response_format",
    ),
    (text_line("x", [1, 2]), "prompt: must be a string or a list of one", "prompt"),
    (text_line("x", ["a", "b"]), "prompt: must be a string or a list of one", "prompt"),
    (chat_line("x", 7), "messages: message 1 has content that is not text", None),
    (chat_line("x", [{"type": "image_url", "image_url": {}}]), "messages: message 1 has content that is", None),
    (chat_line("x", messages=[]), "messages: a chat without messages", None),
    (chat_line("x", max_tokens=512), "max_tokens of 512 leaves no room for a prompt in the context of 512", None),
    (chat_line("x", "y" * 600), "exceed the context of 512", None),
    (text_line("x", ""), "the prompt is empty", None),
]


def test_a_request_that_cannot_be_honoured_is_status_400_and_touches_no_other(tmp_path: Path) -> None:
    lines = [{**line, "custom_id": f"x{at}"} for at, (line, _, _) in enumerate(REFUSED)]
    failures = failures_of(tmp_path, [chat_line("before"), *lines, chat_line("after")])
    assert [line["custom_id"] for line in failures] == [line["custom_id"] for line in lines]
    for failure, (_, message, param) in zip(failures, REFUSED, strict=True):
        assert (failure["error"], failure["response"]["status_code"]) == (None, 400)
        error = failure["response"]["body"]["error"]
        assert message in error["message"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert [answer["custom_id"] for answer in read_lines(tmp_path / "out")[0]] == ["before", "after"]


def test_too_long_has_the_code_clients_look_for_and_can_be_cut_instead(tmp_path: Path) -> None:
    (failure,) = failures_of(tmp_path, [chat_line("x", "y" * 600)])
    assert failure["response"]["body"]["error"]["code"] == "context_length_exceeded"
    write_lines(tmp_path, [text_line("x", "y" * 600)])
    run(job_of(tmp_path, prompt={"on_too_long": "truncate_left"}, output__path="cut"), models=models())
    ((answer,), failures) = read_lines(tmp_path / "cut")
    assert (failures, answer["response"]["body"]["usage"]["prompt_tokens"]) == ([], 500)


def test_a_line_that_is_no_request_is_an_error_with_its_number(tmp_path: Path) -> None:
    lines = [chat_line("a"), "{broken", chat_line("b"), '{"method": "POST"}', '{"custom_id": "c", "extra": 1}', "[]"]
    write_lines(tmp_path, lines)
    run(job_of(tmp_path), models=models())
    answers, failures = read_lines(tmp_path / "out")
    assert [line["custom_id"] for line in answers] == ["a", "b"]
    assert [line["custom_id"] for line in failures] == [None, None, "c", None]
    assert [line["response"] for line in failures] == [None] * 4
    messages = [line["error"]["message"] for line in failures]
    assert [message.split(":")[0] for message in messages] == [f"batch.jsonl line {at}" for at in (2, 4, 5, 6)]
    assert "not valid JSON" in messages[0]
    assert "custom_id is missing" in messages[1]
    assert "unknown key 'extra'" in messages[2]
    assert {line["error"]["code"] for line in failures} == {"bad_row"}


def test_a_request_the_engine_could_not_answer_has_no_response(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def _complete(self, request: Request) -> Completion:
            done = super()._complete(request)
            error = RowError("engine", "generate", "larger than the memory", True)
            return replace(done, samples=(), error=error) if request.key == 1 else done

    write_lines(tmp_path, [chat_line("a"), chat_line("b"), chat_line("c")])
    run(job_of(tmp_path), models=models(Broken(tokenizer=ChatTokenizer())))
    (failure,) = read_lines(tmp_path / "out")[1]
    assert (failure["custom_id"], failure["response"]) == ("b", None)
    assert failure["error"] == {"code": "engine", "message": "larger than the memory"}


def test_the_same_custom_id_twice_names_both_lines(tmp_path: Path) -> None:
    write_lines(tmp_path, [chat_line("a"), chat_line("b"), chat_line("a")])
    with pytest.raises(InputError, match=r"'a' twice: batch.jsonl line 1, batch.jsonl line 3") as caught:
        run(job_of(tmp_path), models=models())
    assert caught.value.exit_code == 2


def test_samples_and_logprobs_of_both_endpoints(tmp_path: Path) -> None:
    lines = [chat_line("a", n=2, logprobs=True, top_logprobs=1), text_line("b", n=2, logprobs=1), chat_line("c")]
    write_lines(tmp_path, lines)
    run(job_of(tmp_path), models=models())
    chat, text, plain = (line["response"]["body"]["choices"] for line in read_lines(tmp_path / "out")[0])
    assert [len(chat), len(text), len(plain)] == [2, 2, 1]
    assert [choice["index"] for choice in chat] == [0, 1]
    content = chat[0]["message"]["content"]
    tokens = chat[0]["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == content
    first = {"token": content[0], "logprob": -0.5, "bytes": [ord(content[0])]}
    assert tokens[0] == {**first, "top_logprobs": [first]}
    logprobs = text[0]["logprobs"]
    assert "".join(logprobs["tokens"]) == text[0]["text"]
    assert logprobs["top_logprobs"][0] == {text[0]["text"][0]: -0.5}
    assert logprobs["text_offset"][:2] == [0, 1]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"])
    assert plain[0]["logprobs"] is None


def test_a_killed_and_a_grown_job_end_as_an_uninterrupted_one(tmp_path: Path) -> None:
    lines = [chat_line(f"r{at}", f"question {at}", n=1 + at % 2) for at in range(30)]
    lines[7] = chat_line("r7", stream=True)
    write_lines(tmp_path, lines)
    run(job_of(tmp_path, output__path="whole"), models=models())
    whole = read_lines(tmp_path / "whole")

    seen: list[int] = []

    def before(request: Request) -> None:
        seen.append(request.key)
        if len(seen) > 12:
            raise RuntimeError("the device is gone")

    write_lines(tmp_path, lines[:20])
    with pytest.raises(RuntimeError):
        run(job_of(tmp_path), models=models(FakeEngine(tokenizer=ChatTokenizer(), before=before, seconds=0.02)))
    assert 0 < read_status(tmp_path / "out").done < 20
    run(job_of(tmp_path), models=models())
    assert len(read_lines(tmp_path / "out")[0]) == 19
    write_lines(tmp_path, lines[20:], mode="a")
    grown = models()
    run(job_of(tmp_path), models=grown)
    assert sorted(grown.fake.asked) == list(range(20, 30))
    assert without_times(read_lines(tmp_path / "out")) == without_times(whole)
    status = read_status(tmp_path / "out")
    assert (status.state, status.counts["error"], status.left) == ("finished", 1, 0)
    again = models()
    assert run(job_of(tmp_path), models=again).exit_code == 0
    assert again.loads == 0


def without_times(lines: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> Any:
    text = json.dumps(lines)
    for part in lines:
        for line in part:
            if line["response"] is not None and line["response"]["status_code"] == 200:
                text = text.replace(f'"created": {line["response"]["body"]["created"]}', '"created": 0')
    return text


def test_errors_can_be_asked_again(tmp_path: Path) -> None:
    class Flaky(FakeEngine):
        def _complete(self, request: Request) -> Completion:
            done = super()._complete(request)
            error = RowError("engine", "generate", "out of memory", True)
            return replace(done, samples=(), error=error) if request.key == 1 else done

    write_lines(tmp_path, [chat_line("a"), chat_line("b"), chat_line("c")])
    run(job_of(tmp_path), models=models(Flaky(tokenizer=ChatTokenizer())))
    before = read_lines(tmp_path / "out")
    run(job_of(tmp_path), RunOptions(retry=parse_retry("errors")), models())
    answers, failures = read_lines(tmp_path / "out")
    assert [line["custom_id"] for line in answers] == ["a", "b", "c"]
    assert failures == []
    assert [answers[0], answers[2]] == before[0]


def test_columns_hold_the_answers_of_a_batch_file_too(tmp_path: Path) -> None:
    lines = [chat_line("a"), chat_line("b", n=2), chat_line("c", logprobs=True), "no json"]
    write_lines(tmp_path, lines)
    run(job_of(tmp_path, output__format="arrow"), models=models())
    rows = read_output(tmp_path / "out")
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", None]
    assert json.loads(rows[0]["body"])["messages"][0]["content"] == "Say hi"
    assert rows[0]["completion"].isalpha()
    assert "n: needs output.format: openai" in rows[1]["error"]["message"]
    assert "logprobs: needs output.format: openai" in rows[2]["error"]["message"]
    run(job_of(tmp_path, output__format="jsonl", output__path="lists", generation__n=2), models=models())
    rows = read_output(tmp_path / "lists", "jsonl")
    assert [len(row["completion"] or []) for row in rows] == [2, 2, 0, 0]


@pytest.mark.parametrize("identify", [False, True])
def test_other_inputs_come_out_as_lines_of_a_batch_api(tmp_path: Path, identify: bool) -> None:
    write_rows(tmp_path, 12)
    if identify:
        (tmp_path / "rows.jsonl").write_text("".join(f'{{"word": "w{at}", "key": {at}}}\n' for at in range(12)))
    settings = {"output__format": "openai", "prompt__chat": False, "prompt__on_null": "skip"}
    if identify:
        settings["input__id"] = "key"
    run(make_job(tmp_path, **settings), models=models())
    answers, failures = read_lines(tmp_path / "out")
    expected = [str(at) for at in range(12)] if identify else [f"row-{at}" for at in range(12) if at != 5]
    assert [line["custom_id"] for line in answers] == expected
    assert failures == []
    assert {line["response"]["body"]["object"] for line in answers} == {"text_completion"}
    counts = manifest(tmp_path / "out")["counts"]
    assert counts["skipped"] == (0 if identify else 1)


def test_the_lines_go_into_a_store_as_well(tmp_path: Path) -> None:
    write_lines(tmp_path, [chat_line("a"), chat_line("b", stream=True)])
    job = job_of(tmp_path, output__path="memory://openai/out")
    run(job, models=models())
    for name, custom_id in (("output.jsonl", "a"), ("errors.jsonl", "b")):
        (line,) = (job.output_path / name).read_text().splitlines()
        assert json.loads(line)["custom_id"] == custom_id
    write_lines(tmp_path, [chat_line("c")], mode="a")
    grown = models()
    run(job, models=grown)
    assert grown.fake.asked == [2]
    assert len((job.output_path / "output.jsonl").read_text().splitlines()) == 2


def test_no_lines_at_all_are_no_answers(tmp_path: Path) -> None:
    write_lines(tmp_path, [])
    run(job_of(tmp_path), models=models())
    assert read_lines(tmp_path / "out") == ([], [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": {"text": "hi"}}, "prompt.text: the lines of an OpenAI batch file bring their prompts"),
        ({"prompt": {"on_null": "skip"}}, "prompt.on_null: the lines of an OpenAI batch file bring their prompts"),
        ({"generation__per_row": {"seed": "x"}}, "generation.per_row: the lines of an OpenAI batch file"),
        ({"input__id": "x"}, "input.id: an OpenAI batch file identifies its lines by custom_id"),
        ({"output__columns": ["body"]}, "output.columns: openai output has no columns"),
        ({"output__prefix": "p_"}, "output.prefix: openai output has no columns"),
        ({"input__format": "jsonl"}, "prompt: is missing; only an OpenAI batch file .* brings its own"),
    ],
)
def test_what_cannot_stand_beside_a_batch_file_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    write_lines(tmp_path, [chat_line("a")])
    with pytest.raises(UsageError, match=message):
        job_of(tmp_path, **settings)


def test_check_says_what_it_found(tmp_path: Path) -> None:
    write_lines(tmp_path, [chat_line("a")])
    lines = check_job(job_of(tmp_path), models())
    assert "columns: custom_id, method, url, body" in lines
    assert any(line.endswith("(openai)") for line in lines)


def test_the_output_must_not_become_input(tmp_path: Path) -> None:
    write_lines(tmp_path, [chat_line("a")])
    with pytest.raises(UsageError, match="would be input by"):
        check_job(job_of(tmp_path, input__path=["batch.jsonl", "*/output.jsonl"]), models())


def test_the_schema_of_the_job_file_wants_no_prompt(tmp_path: Path) -> None:
    assert "prompt" not in Job.model_json_schema()["required"]
    assert Job.load(write_job(tmp_path)).prompt.text == "Say {{ word }}"


def test_the_example_is_a_job_whose_lines_are_read_as_meant(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "openai-batch"
    job = Job.load(example / "job.yaml", {"output.path": str(tmp_path / "out")})
    assert "columns: custom_id, method, url, body" in check_job(job)
    assert run(job, models=models()).counts["error"] == 1
    answers, failures = read_lines(tmp_path / "out")
    assert [line["custom_id"] for line in answers] == ["capital", "two-answers", "likely-words", "story"]
    assert [line["custom_id"] for line in failures] == ["tools"]
