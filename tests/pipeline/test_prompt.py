"""Prompts: what a row becomes, and that each of its faults is its own."""

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import BOS, CHAT_TEMPLATE, ByteTokenizer, row_batch

from batchgen.engine.request import Request, Sampling
from batchgen.pipeline.config import PromptSettings
from batchgen.pipeline.prompt import PromptError, Renderer, template_columns
from batchgen.pipeline.rows import RowBatch, RowTag, Skipped, bad_row
from batchgen.pipeline.templates import TemplateError

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ messages[0].content }}"
)
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ doc }}"}]}


def renderer_of(
    prompt: dict[str, Any],
    tokenizer: ByteTokenizer | None = None,
    base: Sampling | None = None,
    context_length: int = 1000,
    **more: Any,
) -> Renderer:
    settings = PromptSettings.model_validate(prompt)
    sampling = base or Sampling(max_tokens=5)
    more.setdefault("per_row", {})
    return Renderer(
        settings,
        sampling,
        tokenizer=tokenizer or ByteTokenizer(),
        context_length=context_length,
        date="2026-03-04",
        **more,
    )


def render(prompt: dict[str, Any], batch: RowBatch, tokenizer: ByteTokenizer | None = None, **more: Any) -> list[Any]:
    return renderer_of(prompt, tokenizer, **more).render(batch)


def texts(outcomes: list[Any]) -> list[str]:
    """Prompts as text, errors as their code, skipped rows as "skipped"."""
    return [text_of(outcome) for outcome in outcomes]


def text_of(outcome: Request | Skipped) -> str:
    if isinstance(outcome, Skipped):
        return "skipped"
    if outcome.error is not None:
        return outcome.error.code
    return b"".join(b"<s>" if token == BOS else bytes([token]) for token in outcome.prompt).decode()


def test_text_goes_raw_without_a_chat_template_and_wrapped_with_one() -> None:
    batch = row_batch(3, doc=["one", "two"])
    outcomes = render({"text": "Say {{ doc }}"}, batch)
    assert texts(outcomes) == ["<s>Say one", "<s>Say two"]
    assert [outcome.key for outcome in outcomes] == [3, 4]
    assert outcomes[0].tag == RowTag(3, Sampling(max_tokens=5))
    chatty = ByteTokenizer(CHAT_TEMPLATE)
    assert texts(render({"text": "Say {{ doc }}"}, batch, chatty))[0] == "<s><user>Say one\n<assistant>"
    assert texts(render({"text": "Say {{ doc }}", "chat": False}, batch, chatty))[0] == "<s>Say one"
    assert texts(render({"text": "{{ doc }}"}, batch, chat_template="[{{ messages[0].content }}]"))[0] == "[one]"


def test_messages_and_messages_columns_give_the_same_prompt() -> None:
    chatty = ByteTokenizer(CHAT_TEMPLATE)
    expected = "<s><system>Be brief.\n<user>hi\n<assistant>"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert texts(render(CHAT, row_batch(doc=["hi"]), chatty)) == [expected]
    batch = row_batch(structs=[chat], json=[json.dumps(chat)])
    for column in ("structs", "json"):
        assert texts(render({"messages_column": column}, batch, chatty)) == [expected]
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert texts(render({"messages_column": "c"}, row_batch(c=[parts]), chatty)) == ["<s><user>hi\n<assistant>"]


def test_fields_that_are_null_in_a_struct_are_absent_from_the_message() -> None:
    template = "{% for m in messages %}{{ m.keys() | list | sort | join(',') }};{% endfor %}"
    chat = [[{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "n"}]]
    outcomes = render({"messages_column": "c"}, row_batch(c=chat), ByteTokenizer(template))
    assert texts(outcomes) == ["content,role;content,name,role;"]


def test_hugging_face_conventions() -> None:
    template = (
        "{% for message in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ message.content }}{% endgeneration %}|{{ message | tojson }}|{{ strftime_now('%d %b %Y') }}"
        "{% if tools is not none %}tools{% endif %}{% if undefined_thing %}x{% endif %}\n{% endfor %}"
    )
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "<é>"}]}
    expected = '<é>|{"role": "user", "content": "<é>"}|04 Mar 2026'
    assert texts(render(chat, row_batch(doc=["a"]), ByteTokenizer(template))) == [expected]


def test_prompts_of_the_job_are_sent_as_written() -> None:
    text = "{% for item in items %}\n  {% if item %}\n* {{ item }}\n  {% endif %}\n{% endfor %}\nAnswer:\n"
    assert texts(render({"text": text}, row_batch(items=[["a", None, "b"]]))) == ["<s>* a\n* b\nAnswer:\n"]


def test_what_the_tokenizer_adds_is_not_doubled() -> None:
    doubled = ByteTokenizer(CHAT_TEMPLATE)
    [chat] = render({"text": "{{ doc }}"}, row_batch(doc=["a"]), doubled)
    assert list(chat.prompt).count(BOS) == 1
    assert texts(render({"text": "<s>{{ doc }}"}, row_batch(doc=["a"]))) == ["<s>a"]


def test_nulls_follow_the_policy_and_nan_is_null() -> None:
    batch = row_batch(doc=["a", None, "c"], score=[1.0, 2.0, math.nan], unused=[None, "x", None])
    prompt = {"text": "{{ doc }} {{ score }}"}
    assert texts(render(prompt, batch)) == ["<s>a 1.0", "null_value", "null_value"]
    assert texts(render({**prompt, "on_null": "empty"}, batch)) == ["<s>a 1.0", "<s> 2.0", "<s>c "]
    skipped = render({**prompt, "on_null": "skip"}, batch)
    assert skipped[1:] == [
        Skipped(1, "column 'doc' is null", "on_null"),
        Skipped(2, "column 'score' is null", "on_null"),
    ]
    assert "None" not in "".join(texts(render({**prompt, "on_null": "empty"}, batch)))


def test_a_null_inside_a_value_is_content_but_never_written() -> None:
    batch = row_batch(d=[{"a": None, "b": 1}, {"a": "x", "b": None}])
    assert texts(render({"text": "{{ d | tojson }}"}, batch))[0] == '<s>{"a": null, "b": 1}'
    assert texts(render({"text": "{% if d.a %}{{ d.a }}{% else %}-{% endif %}"}, batch)) == ["<s>-", "<s>x"]
    [bad, fine] = render({"text": "{{ d.a }}"}, batch)
    assert (bad.error.code, bad.error.message) == ("null_value", "prompt.text writes a null")
    assert text_of(fine) == "<s>x"
    assert texts(render({"text": "[{{ d.a }}]", "on_null": "empty"}, batch)) == ["<s>[]", "<s>[x]"]
    assert texts(render({"text": "{{ d.a }}", "on_null": "skip"}, batch)) == ["skipped", "<s>x"]


@pytest.mark.parametrize("policy", ["error", "skip", "empty"])
def test_a_null_chat_follows_the_policy(policy: str) -> None:
    batch = row_batch(c=pa.array([None, "[]"], pa.string()))
    outcomes = render({"messages_column": "c", "on_null": policy}, batch, ByteTokenizer(CHAT_TEMPLATE))
    expected = {"error": "null_value", "skip": "skipped", "empty": "bad_messages"}[policy]
    assert texts(outcomes) == [expected, "bad_messages"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[]", "a chat without messages"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"role": "user", "content": "a"}', "not a list of messages but dict"),
        ('["a"]', "message 1 is not an object with role and content but str"),
        (
            '[{"role": "user", "content": "a"}, {"role": "user", "content": 5}]',
            "message 2 has content that is not text",
        ),
        ('[{"role": "user"}]', "message 1 has content that is not text but NoneType"),
        ('[{"from": "human", "value": "a"}]', "message 1 has no role"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "not text but list"),
    ],
)
def test_bad_chats_are_their_rows_error(value: str, expected: str) -> None:
    good = '[{"role": "user", "content": "a"}]'
    batch = row_batch(c=[good, value, good])
    first, bad, last = render({"messages_column": "c"}, batch, ByteTokenizer(CHAT_TEMPLATE))
    assert (bad.error.code, bad.error.stage) == ("bad_messages", "prompt")
    assert expected in bad.error.message
    assert first.error is last.error is None


def test_empty_prompts() -> None:
    batch = row_batch(doc=["", " ", "a"])
    assert texts(render({"text": "{{ doc }}"}, batch)) == ["empty_prompt", "<s> ", "<s>a"]
    chatty = ByteTokenizer(CHAT_TEMPLATE)
    assert texts(render({"text": "{{ doc }}"}, batch, chatty))[0] == "empty_prompt"
    assert texts(render(CHAT, batch, chatty))[0] == "empty_prompt"
    assert texts(render(CHAT, batch, chatty))[1] == "<s><system>Be brief.\n<user> \n<assistant>"


def test_template_errors_name_template_and_reason() -> None:
    batch = row_batch(d=[{"a": 1}, {"a": 0}])
    fine, bad = render({"text": "{{ 1 / d.a }}"}, batch)
    assert text_of(fine) == "<s>1.0"
    assert bad.error.message == "prompt.text: ZeroDivisionError: division by zero"
    [missing, _] = render({"text": "{{ d.b }}"}, batch)
    assert missing.error.code == "template"
    assert "'dict object' has no attribute 'b'" in missing.error.message
    for text in ("{{ d.__class__.__mro__ }}", "{{ d.clear() }}", "{{ raise_exception('no') }}", "{{ range }}{{ d }}"):
        assert texts(render({"text": text}, batch)) == ["template", "template"]


def test_a_template_that_refuses_or_drops_the_system_message_says_so() -> None:
    batch = row_batch(doc=["a"])
    [refused] = render(CHAT, batch, ByteTokenizer(NO_SYSTEM))
    assert refused.error.message == "chat template: System role not supported"
    user_only = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    [dropped] = render(CHAT, batch, ByteTokenizer(user_only))
    assert dropped.error.code == "template"
    assert "leaves the system message out" in dropped.error.message


@pytest.mark.parametrize("prompt", [CHAT, {"messages_column": "c"}, {"text": "a", "chat": True}])
def test_chats_need_a_chat_template(prompt: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=r"the model has no chat template; set model\.chat_template") as caught:
        renderer_of(prompt)
    assert caught.value.exit_code == 2


def test_bad_jinja_is_told_with_its_line() -> None:
    with pytest.raises(TemplateError, match=r"prompt\.text: line 2: unexpected '}'"):
        template_columns(PromptSettings(text="a\n{{ b } }}"))
    with pytest.raises(TemplateError, match=r"prompt\.messages\[1\]\.content: line 1"):
        template_columns(
            PromptSettings.model_validate(
                {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "{% if %}"}]}
            )
        )
    with pytest.raises(TemplateError, match="chat template: line 1"):
        renderer_of({"text": "a"}, ByteTokenizer("{% for %}"))


def test_columns_used_are_found() -> None:
    text = "{% set z = a %}{{ z }}{% for i in range(3) %}{{ b.c[i] }}{% endfor %}{{ namespace(x=1).x }}"
    assert template_columns(PromptSettings(text=text)) == {"a", "b"}
    assert template_columns(PromptSettings(messages_column="c")) == {"c"}
    assert renderer_of({"text": "{{ a }}"}, per_row={"seed": "s"}).columns == {"a", "s"}


def test_values_of_the_row_override_those_of_the_job() -> None:
    batch = row_batch(
        doc=["a"] * 5,
        t=pa.array([0.5, None, math.nan, 2.0, 0.5], pa.float64()),
        m=pa.array([7.0, None, 3.0, 5.0, 7.0], pa.float64()),
        s=[["x", "y"], None, ["z"], None, ["x", "y"]],
    )
    base = Sampling(max_tokens=5, temperature=1.0, stop=("job",))
    per_row = {"temperature": "t", "max_tokens": "m", "stop": "s"}
    outcomes = render({"text": "{{ doc }}"}, batch, base=base, per_row=per_row)
    found = [(one.sampling.temperature, one.sampling.max_tokens, one.sampling.stop) for one in outcomes]
    assert found[:4] == [(0.5, 7, ("x", "y")), (1.0, 5, ("job",)), (1.0, 3, ("z",)), (2.0, 5, ("job",))]
    assert outcomes[4].sampling is outcomes[0].sampling  # made and checked once


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", -1.0, "temperature: must be between 0 and 100, got -1.0 (column 'v')"),
        ("top_p", 2.0, "top_p: must be between 0 and 1"),
        ("max_tokens", 2.5, "max_tokens: must be an integer, got 2.5"),
        ("max_tokens", 0, "max_tokens: must be between 1"),
        ("max_tokens", "many", "max_tokens: must be an integer"),
        ("temperature", [1.0], "temperature: must be a number"),
        ("seed", True, "seed: must be an integer"),
        ("stop", [""], "stop: must hold non-empty strings"),
        ("stop", 5, "stop: must hold non-empty strings"),
        ("min_tokens", 9, "min_tokens: must not exceed max_tokens"),
    ],
)
def test_a_bad_value_is_its_rows_error(key: str, value: Any, expected: str) -> None:
    batch = row_batch(doc=["a", "b", "c"], v=pa.array([None, value, None]))
    first, bad, last = render({"text": "{{ doc }}"}, batch, per_row={key: "v"})
    assert (bad.error.code, bad.error.stage) == ("bad_params", "request")
    assert expected in bad.error.message
    assert texts([first, last]) == ["<s>a", "<s>c"]


def test_keys_that_cannot_differ_per_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"generation\.per_row: n cannot differ per row"):
        renderer_of({"text": "a"}, per_row={"n": "c"})


def test_the_context_is_a_limit_of_both_together() -> None:
    batch = row_batch(doc=["x" * 14, "x" * 15, "x" * 200, "x"])
    outcomes = render({"text": "{{ doc }}"}, batch, context_length=20)
    assert [outcome.error is None for outcome in outcomes] == [True, False, False, True]
    assert outcomes[1].error.code == "context_length"
    assert outcomes[1].error.message == "prompt of 16 tokens and max_tokens of 5 exceed the context of 20"
    assert texts(render({"text": "{{ doc }}", "on_too_long": "skip"}, batch, context_length=20))[1:3] == ["skipped"] * 2


def test_raw_text_is_cut_in_tokens_and_keeps_its_start_token() -> None:
    batch = row_batch(doc=["0123456789" * 3])
    left = render({"text": "{{ doc }}", "on_too_long": "truncate_left"}, batch, context_length=20)
    right = render({"text": "{{ doc }}", "on_too_long": "truncate_right"}, batch, context_length=20)
    assert texts(left) == ["<s>67890123456789"]
    assert texts(right) == ["<s>01234567890123"]
    full = render(
        {"text": "{{ doc }}", "on_too_long": "truncate_left"}, batch, context_length=20, base=Sampling(max_tokens=19)
    )
    assert texts(full) == ["context_length"]


@pytest.mark.parametrize("side", ["truncate_left", "truncate_right"])
@given(content=st.text(min_size=1, max_size=60), room=st.integers(1, 60))
def test_of_a_chat_only_the_last_user_message_is_cut(side: str, content: str, room: int) -> None:
    prompt = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "first"},
            {"role": "user", "content": "{{ doc }}"},
        ],
        "on_too_long": side,
    }
    frame = "<s><system>S\n<user>first\n<user>{}\n<assistant>"
    room += len(frame) - 4
    [outcome] = render(prompt, row_batch(doc=[content]), ByteTokenizer(CHAT_TEMPLATE), context_length=room + 5)
    if outcome.error is not None:
        assert outcome.error.code == "context_length"
        return
    before, after = frame.split("{}")
    kept = text_of(outcome)[len(before) : -len(after)]
    assert text_of(outcome) == before + kept + after
    assert content.endswith(kept) if side == "truncate_left" else content.startswith(kept)
    assert len(outcome.prompt) <= room
    if kept != content:
        assert len(outcome.prompt) > room - 4  # no more was cut than a character needs


def test_one_row_that_the_tokenizer_refuses_harms_no_other() -> None:
    tokenizer = ByteTokenizer(poison="7")
    outcomes = render({"text": "{{ doc }}"}, row_batch(doc=[str(number) for number in range(10)]), tokenizer)
    assert texts(outcomes) == [f"<s>{number}" if number != 7 else "template" for number in range(10)]
    assert "the tokenizer refuses the prompt: RuntimeError: cannot tokenise this" in outcomes[7].error.message


def test_the_tokenizer_is_called_with_lists() -> None:
    tokenizer = ByteTokenizer()
    render({"text": "{{ doc }}"}, row_batch(doc=["a"] * 500), tokenizer)
    assert tokenizer.calls[-1] == 500
    assert len(tokenizer.calls) <= 3


def test_rows_that_could_not_be_read_travel_along() -> None:
    batch = RowBatch(5, pa.record_batch({"doc": ["a", None, "c"]}), {1: bad_row("line 2: broken")})
    outcomes = render({"text": "{{ doc }}"}, batch)
    assert texts(outcomes) == ["<s>a", "bad_row", "<s>c"]
    assert outcomes[1].key == 6
    assert list(outcomes[1].prompt) == []


def test_done_rows_are_left_out() -> None:
    renderer = renderer_of({"text": "{{ doc }}"})
    outcomes = renderer.render(row_batch(10, doc=["a", "b", "c"]), done=lambda position: position == 11)
    assert [outcome.key for outcome in outcomes] == [10, 12]


def test_values_without_a_python_form_are_their_rows_error() -> None:
    stamps = pa.array([0, 2**62], pa.timestamp("s"))
    outcomes = render({"text": "{{ t.year }}"}, RowBatch(0, pa.record_batch({"t": stamps})))
    assert texts(outcomes) == ["<s>1970", "bad_row"]


def test_lone_surrogates_in_json_text_do_not_reach_the_tokenizer() -> None:
    chat = r'[{"role": "user", "content": "a\udc00b"}]'
    outcomes = render({"messages_column": "c"}, row_batch(c=[chat]), ByteTokenizer(CHAT_TEMPLATE))
    assert "a\ufffdb" in text_of(outcomes[0])


class PairTokenizer(ByteTokenizer):
    """A token per pair of characters, with every character doubled by its neighbour: cutting changes the other cuts."""

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [[ord(text[at]) for at in range(0, len(text), 2)] for text in texts]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(token) * 2 for token in tokens)


def test_a_chat_is_cut_again_until_it_fits_and_no_more_than_needed() -> None:
    prompt = {"messages": [{"role": "user", "content": "{{ doc }}"}], "on_too_long": "truncate_right"}
    tokenizer = PairTokenizer("{% for m in messages %}[{{ m.content | replace('z', 'zzzzzzzz') }}]{% endfor %}")
    doc = "aa" * 10 + "zz" * 2
    [outcome] = render(prompt, row_batch(doc=[doc]), tokenizer, context_length=18)
    assert outcome.error is None
    assert len(outcome.prompt) == 11  # "[" and ten pairs of a and "]"; one pair more would be eight times as long


def test_a_stop_that_holds_no_strings_is_its_rows_error() -> None:
    batch = row_batch(doc=["a", "b"], s=[[{"x": "q"}], [{"x": "r"}]])
    assert texts(render({"text": "{{ doc }}"}, batch, per_row={"stop": "s"})) == ["bad_params", "bad_params"]


def test_a_null_that_is_written_empty_leaves_the_jobs_value() -> None:
    batch = row_batch(doc=["a", "b"], t=[0.5, None])
    prompt = {"text": "{{ doc }}{{ t }}", "on_null": "empty"}
    outcomes = render(prompt, batch, per_row={"temperature": "t"})
    assert texts(outcomes) == ["<s>a0.5", "<s>b"]
    assert [outcome.sampling.temperature for outcome in outcomes] == [0.5, 1.0]


def test_a_chat_of_which_not_one_character_fits_is_an_error() -> None:
    """One token of the two that make a character has room: an empty question would be asked."""
    prompt = {"messages": [{"role": "user", "content": "{{ doc }}"}], "on_too_long": "truncate_right"}
    tokenizer = ByteTokenizer("[{{ messages[0].content }}]")
    [one] = render(prompt, row_batch(doc=["\u00e9" * 5]), tokenizer, context_length=9)
    assert text_of(one) == "[\u00e9]"
    [none] = render(prompt, row_batch(doc=["\u00e9" * 5]), tokenizer, context_length=8)
    assert texts([none]) == ["context_length"]


class BoundedTokenizer(ByteTokenizer):
    def fewest_tokens(self, text: str) -> int:
        return len(text) // 4


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_text_that_cannot_fit_by_its_characters_is_never_tokenised(policy: str) -> None:
    tokenizer = BoundedTokenizer()
    rows = row_batch(c=["x" * 400, "y" * 20, "z" * 1000])
    tokenizer.calls.clear()
    outcomes = render({"text": "{{ c }}", "on_too_long": policy}, rows, tokenizer, context_length=100)
    assert sum(tokenizer.calls[2:]) == 1  # after what the renderer asked about the tokens it adds
    message = "prompt of at least 249 tokens and max_tokens of"
    if policy == "error":
        assert [outcome.error.code if outcome.error else None for outcome in outcomes] == [
            "context_length", None, "context_length",
        ]  # fmt: skip
        assert outcomes[2].error.message.startswith(message)
    else:
        assert [isinstance(outcome, Skipped) for outcome in outcomes] == [True, False, True]
        assert outcomes[2].reason.startswith(message)


def test_a_text_that_may_be_cut_is_tokenised_whatever_its_length() -> None:
    tokenizer = BoundedTokenizer()
    prompt = {"text": "{{ c }}", "on_too_long": "truncate_right"}
    [outcome] = render(prompt, row_batch(c=["x" * 1000]), tokenizer, context_length=100)
    assert outcome.error is None
