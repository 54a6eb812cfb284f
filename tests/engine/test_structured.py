"""Answers under a grammar, on tiny models: always legal, the same with and without forced tokens, rows as islands."""

import json
import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from other_logits import change_logits
from tiny_gguf import sentencepiece_keys, write_gguf

from batchgen.engine import Engine, Grammar, Request, Sampling
from batchgen.engine.grammars import Grammars
from batchgen.engine.graphs import Eager
from batchgen.engine.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "the fox": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["dog", "quick brown fox", "quick"]},
        "with": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["the fox", "kind", "with"],
    "additionalProperties": False,
}
CHOICES = ["the", "the fox", "then", "over the lazy dog", "q"]
PATTERN = "(the|then) [a-d]{2,4}[.]"
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "choices": Grammar.choices(CHOICES),
    "regex": Grammar.regex(PATTERN),
    "lark": Grammar.lark('start: "jumps over the " (A | B)+ "."\nA: "lazy "\nB: "dog "'),
}
PROMPTS = [tiny.random_prompt(5 + 7 * at, seed=at) for at in range(4)]


def legal(name: str, text: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        return list(value) == list(SCHEMA["properties"]) and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    if name == "choices":
        return text in CHOICES
    return re.fullmatch(PATTERN if name == "regex" else r"jumps over the ((lazy )|(dog ))+\.", text) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


def load(folder: Path, forcing: bool = True, **settings) -> Engine:
    engine = Engine.load(str(folder), device="cpu", dtype="float32", **{"memory": "1MiB", **settings})
    engine.grammars.set_forcing(forcing)
    return engine


def requests(**values) -> list[Request]:
    """Every prompt under every grammar."""
    chosen = Sampling(**{"max_tokens": 80, "temperature": 1.3, **values})
    return [
        Request(10 * at + number, prompt, replace(chosen, grammar=grammar), tag=name)
        for number, (name, grammar) in enumerate(GRAMMARS.items())
        for at, prompt in enumerate(PROMPTS)
    ]


def run(engine: Engine, wanted: Iterable[Request]) -> dict:
    found = {completion.key: completion for completion in engine.run(wanted)}
    assert [completion.error for completion in found.values() if completion.error] == []
    return found


def assert_equal(answers: dict, expected: dict) -> None:
    """The same tokens, endings and, but for rounding, log-probabilities."""
    assert answers.keys() == expected.keys()
    for key, one in answers.items():
        for sample, other in zip(one.samples, expected[key].samples, strict=True):
            assert (sample.tokens, sample.finish_reason) == (other.tokens, other.finish_reason), key
            pairs = zip(sample.logprobs or (), other.logprobs or (), strict=True)
            assert all(entry.logprob == pytest.approx(same.logprob, abs=1e-4) for entry, same in pairs)


VARIANTS = {
    "greedy": {"temperature": 0},
    "hot": {},
    "filters": {"top_k": 7, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.2},
    "two samples": {"n": 2},
    "log-probabilities": {"logprobs": 2},
    "at least 9 tokens": {"min_tokens": 9},
    "short": {"max_tokens": 4},
    "stop string": {"stop": ("fox", "a.")},
    "own end token": {"stop_token_ids": (tiny.SPECIAL_TOKENS.index("<|user|>"),), "ignore_eos": True},
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_forced_tokens_and_masks_alone_give_the_same_answers(folder, name):
    engine, masked = load(folder), load(folder, forcing=False)
    wanted = requests(**VARIANTS[name])
    answers, expected = run(engine, wanted), run(masked, wanted)
    assert_equal(answers, expected)
    assert masked.statistics.forced_tokens == 0
    if "logprobs" in VARIANTS[name]:  # drawn one by one, so that each has its own
        assert engine.statistics.forced_tokens == 0
    else:
        assert engine.statistics.forced_tokens > 20
        assert engine.statistics.steps < masked.statistics.steps or "max_tokens" in VARIANTS[name]


@pytest.mark.parametrize("name", ["greedy", "hot", "penalties", "log-probabilities", "short", "stop string"])
def test_drafts_change_nothing_under_a_grammar(folder, name):
    """Rows are asked twice, so that the drafter has seen their like; a guess against the grammar is never taken."""
    wanted = requests(**VARIANTS[name])
    wanted += [Request(1000 + one.key, one.prompt, one.sampling, tag=one.tag) for one in wanted]
    drafted = load(folder, speculation="suffix", max_sequences=4)
    assert_equal(run(drafted, iter(wanted)), run(load(folder, speculation="off"), wanted))
    assert drafted.statistics.accepted_tokens > 0


@pytest.mark.parametrize("family", ["mistral", "qwen3", "smollm2"])
def test_forcing_equals_masks_in_other_families(family, tmp_path):
    folder = tiny.tiny_model(family, tmp_path / family)
    wanted = requests(temperature=0)
    assert_equal(run(load(folder), wanted), run(load(folder, forcing=False), wanted))


@pytest.mark.parametrize("name", ["greedy", "hot", "filters", "penalties", "two samples", "log-probabilities"])
def test_every_answer_is_legal_or_cut(folder, name):
    engine = load(folder)
    ended = 0
    wanted = requests(**VARIANTS[name], seed=5)
    for key, completion in run(engine, wanted).items():
        for sample in completion.samples:
            text = engine.tokenizer.decode(sample.tokens)
            ended += sample.finish_reason == "stop"
            assert sample.finish_reason == "length" or legal(completion.tag, text), (key, text)
            assert sample.finish_reason == "stop" or len(sample.tokens) == 80
    assert ended > len(wanted) / 2


def test_a_row_answers_the_same_alone_in_a_batch_and_preempted(folder):
    wanted = requests()
    alone = [run(load(folder), [request])[request.key].tokens for request in wanted]
    mixed = [Request(100 + at, prompt, Sampling(max_tokens=30, temperature=1)) for at, prompt in enumerate(PROMPTS)]
    shape = load(folder).model.kv_shape()
    tight = load(folder, block_size=4, memory=shape.bytes_per_token * 4 * 30, max_batch_tokens=24)
    # answers that end at once make the forecast small, so that the following ones are let in too early
    ends = Sampling(max_tokens=100, temperature=0, stop_token_ids=tuple(range(280)))
    short = [Request(1000 + at, [6 + at], ends) for at in range(64)]
    for engine in (load(folder), tight):
        found = run(engine, iter([*short, *wanted, *mixed]))
        assert [found[request.key].tokens for request in wanted] == alone
    assert tight.statistics.preemptions > 0


def test_a_grammar_ends_the_row_without_an_end_token(folder):
    (completion,) = load(folder).run(
        [Request(0, PROMPTS[0], Sampling(temperature=0, grammar=Grammar.regex("the fox")))]
    )
    assert completion.finish_reason == "stop"
    assert completion.tokens == load_tokenizer(str(folder)).encode(["the fox"], False)[0]


def test_the_last_legal_token_is_a_stop_even_at_max_tokens(folder):
    tokens = load_tokenizer(str(folder)).encode(["the fox"], False)[0]
    chosen = Sampling(max_tokens=len(tokens), min_tokens=len(tokens), temperature=0, grammar=Grammar.regex("the fox"))
    (completion,) = load(folder).run([Request(0, PROMPTS[0], chosen)])
    assert (completion.tokens, completion.finish_reason) == (tokens, "stop")
    short = replace(chosen, max_tokens=len(tokens) - 1, min_tokens=0)
    (completion,) = load(folder).run([Request(0, PROMPTS[0], short)])
    assert (completion.tokens, completion.finish_reason) == (tokens[:-1], "length")


def test_end_tokens_come_only_where_the_answer_is_complete(folder):
    """Whatever the ends are: the model's, the request's own, or none while they are ignored."""
    own = tiny.SPECIAL_TOKENS.index("<|user|>")
    grammar = Grammar.regex("[ab]{3,}")
    ends = {(): {tiny.EOS, tiny.TURN_END}, (own,): {tiny.EOS, tiny.TURN_END, own}}
    seen = set()
    for stop_ids, allowed in ends.items():
        chosen = Sampling(max_tokens=12, temperature=3.0, stop_token_ids=stop_ids, grammar=grammar)
        for completion in load(folder).run([Request(key, PROMPTS[1], chosen) for key in range(60)]):
            letters = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
            text = load_tokenizer(str(folder)).decode(letters)
            assert re.fullmatch("[ab]{3,}", text)
            if completion.finish_reason == "stop":
                assert completion.tokens[-1] in allowed
                seen.add(completion.tokens[-1])
    assert seen == {tiny.EOS, tiny.TURN_END, own}
    ignoring = Sampling(max_tokens=12, temperature=3.0, ignore_eos=True, grammar=grammar)
    for completion in load(folder).run([Request(key, PROMPTS[1], ignoring) for key in range(20)]):
        assert (len(completion.tokens), completion.finish_reason) == (12, "length")


def test_a_bad_grammar_is_its_rows_error_and_no_other_s(folder):
    good = Sampling(max_tokens=20, temperature=0, grammar=GRAMMARS["choices"])
    wanted = [Request(key, PROMPTS[key], good) for key in range(3)]
    wanted[1] = Request(1, PROMPTS[1], replace(good, grammar=Grammar.regex("[")))
    found = {completion.key: completion for completion in load(folder).run(wanted)}
    assert (found[1].error.code, found[1].error.stage) == ("bad_grammar", "request")
    assert found[1].error.message == "regex: unclosed character class"
    assert found[0].finish_reason == found[2].finish_reason == "stop"


def test_a_grammar_beyond_its_limits_is_its_rows_error(folder, monkeypatch):
    engine = load(folder)
    state = engine.grammars.start(GRAMMARS["regex"])
    monkeypatch.setattr(type(state), "error", property(lambda self: "ParserTooComplex"))
    chosen = Sampling(max_tokens=20, temperature=0, grammar=GRAMMARS["regex"])
    bad, plain = Request(0, PROMPTS[0], chosen), Request(1, PROMPTS[1], Sampling(max_tokens=3, temperature=0))
    found = {completion.key: completion for completion in engine.run([bad, plain])}
    assert found[0].error.code == "bad_grammar"
    assert "ParserTooComplex" in found[0].error.message
    assert found[1].error is None


def test_equal_grammars_are_compiled_once(folder):
    engine = load(folder)
    rows = [
        Request(
            key, [6 + key % 200], Sampling(max_tokens=2, grammar=Grammar.json_schema(json.loads(json.dumps(SCHEMA))))
        )
        for key in range(300)
    ]
    run(engine, rows)
    assert engine.grammars.num_compiled == 1


def test_masks_are_filled_beside_the_forward_pass(folder, monkeypatch):
    """The pass of a step waits here until its masks are there: they must not wait for it in turn."""
    engine, filled, fill = load(folder, forcing=False), threading.Event(), Grammars._fill

    def filling(grammars, states):
        fill(grammars, states)
        filled.set()

    class Waiting(Eager):
        def forward(self, model, batch, pages):
            assert filled.wait(30)
            filled.clear()
            return model.forward(batch, pages)

    monkeypatch.setattr(Grammars, "_fill", filling)
    engine._runner.executor = Waiting()
    chosen = Sampling(max_tokens=30, temperature=0, grammar=Grammar.regex("(the|then) jumps over [a-z]{9}"))
    (completion,) = engine.run([Request(0, PROMPTS[0], chosen)])  # each of its states comes for the first time
    assert completion.finish_reason == "stop"


def test_masks_are_filled_once_for_rows_in_the_same_state(folder, monkeypatch):
    filled = []
    fill = Grammars._fill
    monkeypatch.setattr(Grammars, "_fill", lambda self, states: (filled.append(len(states)), fill(self, states))[1])
    chosen = Sampling(max_tokens=20, temperature=1.0, grammar=GRAMMARS["choices"])
    run(load(folder), [Request(key, [6 + key % 200], chosen) for key in range(200)])
    assert filled[0] == 1
    assert sum(filled) < 60


@pytest.mark.parametrize("liked", ["Ġ", "Ċ", "ĉ"])  # blank, line break, tab
def test_json_ends_though_the_model_likes_blanks(folder, liked):
    engine = load(folder)
    blank = engine.tokenizer.backend.token_to_id(liked)

    def biased(logits):
        logits[:, blank] += 1000.0
        return logits

    change_logits(engine, biased)
    for completion in run(engine, requests(temperature=0)).values():
        text = engine.tokenizer.decode(completion.tokens)
        assert completion.tag == "lark" or (completion.finish_reason == "stop" and legal(completion.tag, text))


OPEN = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "list": {
            "type": "array",
            "items": {"type": "object", "properties": {"k": {"enum": ["a", "bc"]}}, "required": ["k"]},
        },
        "kind": {"enum": ["the", "fox", "dog"]},
        "number": {"type": "number"},
    },
    "required": ["text", "list", "kind", "number"],
}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_is_closed_in_time(folder, temperature):
    """Whatever the limit, once the shortest answer fits; texts, lists and numbers of the schema have no end."""
    engine, off = load(folder), load(folder, speculation="off", max_sequences=1)
    grammar = Grammar.json_schema(OPEN)
    shortest = engine.grammars._closing.length(engine.grammars.start(grammar).matcher)
    wanted = [
        Request(key, PROMPTS[key % 4], Sampling(max_tokens=limit, temperature=temperature, grammar=grammar))
        for key, limit in enumerate(range(shortest + 2, shortest + 50, 6))
    ]
    found = run(engine, wanted)
    assert_equal(found, run(off, wanted))
    cut = [key for key, one in found.items() if one.finish_reason != "stop"]
    assert cut == []
    for one in found.values():
        assert set(json.loads(engine.tokenizer.decode(one.tokens))) >= set(OPEN["required"])


def needs(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


NUMBER, MATCHING = {"type": "number"}, {"type": "string", "pattern": "b"}
LEFT_OPEN = {  # schema, what there is of an answer, tokens that close it at most (a character each)
    "array of two": ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[72", 3),
    "array of many": ({"type": "array", "items": {"type": "integer"}, "minItems": 20}, "[72", 39),
    "nested arrays": ({"type": "array", "items": {"type": "array", "items": NUMBER, "minItems": 2}}, "[[7", 4),
    "number, then null": (needs(a=NUMBER, b={"type": "null"}), '{"a":1.5', 10),
    "sign, then null": (needs(a=NUMBER, b={"type": "null"}), '{"a":-', 11),
    "range": (needs(a={"type": "integer", "minimum": 1000, "maximum": 99999}), '{"a":', 5),
    "pattern anywhere": (needs(a=MATCHING), '{"a":"xxx', 3),
    "patterns": ({"type": "array", "items": MATCHING, "minItems": 3}, '["x', 12),
    "pattern between": (needs(a={"type": "string", "pattern": "^[a-z]+@[a-z]+[.]com$"}), '{"a":"x', 8),
    "length": (needs(a={"type": "string", "minLength": 12}), '{"a":"', 14),
}


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_a_way_to_close_is_found(folder, name):
    """Also where no closing character may follow at once."""
    schema, text, most = LEFT_OPEN[name]
    grammars = load(folder).grammars
    state = grammars.start(Grammar.json_schema(schema))
    for token in load_tokenizer(str(folder)).encode([text], False)[0]:
        state = state.after(token)
    assert state.error is None
    assert grammars._closing.length(state.matcher) is not None
    assert grammars._closing.length(state.matcher) <= most


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_what_is_left_open_is_closed_in_time(folder, name):
    """At any temperature, with a model that likes digits and the letter a."""
    engine, grammar = load(folder), Grammar.json_schema(LEFT_OPEN[name][0])
    shortest = engine.grammars._closing.length(engine.grammars.start(grammar).matcher)
    liked = [engine.tokenizer.backend.token_to_id(text) for text in "7a"]

    def biased(logits):
        logits[:, liked] += 1000.0
        return logits

    change_logits(engine, biased)
    rows = [
        Request(limit, PROMPTS[limit % 4], Sampling(max_tokens=limit, temperature=limit % 2, grammar=grammar))
        for limit in range(shortest + 2, shortest + 30, 9)
    ]
    assert {one.finish_reason for one in run(engine, rows).values()} == {"stop"}


def test_the_way_out_of_a_text_is_its_quote(folder):
    """Not brackets, which a text may hold."""
    grammars = load(folder).grammars
    schema = {"type": "object", "properties": {"the": {"type": "string"}}, "required": ["the"]}
    state = grammars.start(Grammar.json_schema(schema))
    for token in load_tokenizer(str(folder)).encode(['{"the":"fox ]}'], False)[0]:
        state = state.after(token)
    assert state.error is None
    assert grammars._closing.length(state.matcher) <= 2


def test_what_is_chosen_while_closing_is_the_models_choice(folder):
    engine, grammar = load(folder), Grammar.json_schema(OPEN)
    rows = [
        Request(key, PROMPTS[key % 4], Sampling(max_tokens=60, temperature=1.5, grammar=grammar)) for key in range(30)
    ]
    kinds = {json.loads(engine.tokenizer.decode(one.tokens))["kind"] for one in run(engine, rows).values()}
    assert kinds == {"the", "fox", "dog"}


def test_a_cut_answer_is_left_as_it_is(folder):
    chosen = Sampling(max_tokens=3, temperature=0, grammar=GRAMMARS["schema"])
    (completion,) = load(folder).run([Request(0, PROMPTS[0], chosen)])
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == 3
    assert '{"the fox":"'.startswith(load_tokenizer(str(folder)).decode(completion.tokens)[:12])


def allowed(grammars: Grammars, grammar: Grammar) -> set[int]:
    """Tokens that may come first."""
    state = grammars.start(grammar)
    grammars.fill([state])
    grammars.wait()
    mask = grammars.allowed(state, grammars._eos_ids, 1000)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_mask_is_the_tokens_whose_text_begins_an_answer(folder):
    tokenizer = load_tokenizer(str(folder))
    texts = {token: tokenizer.token_text(token) for token in range(len(tiny.SPECIAL_TOKENS), tokenizer.size)}
    begins = {token for token, text in texts.items() if any(choice.startswith(text) for choice in CHOICES)}
    assert len(begins) == 5
    assert allowed(Grammars(tokenizer, frozenset({tiny.EOS})), GRAMMARS["choices"]) == begins


@pytest.mark.parametrize("prefix", [True, False])
def test_masks_of_a_sentencepiece_vocabulary(folder, tmp_path, prefix):
    dropped = ("tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
    write_gguf(folder, tmp_path / "model.gguf", keys=sentencepiece_keys(add_space_prefix=prefix), drop=dropped)
    tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
    grammars = Grammars(tokenizer, frozenset({2}))
    pieces = {tokenizer.backend.id_to_token(token) for token in allowed(grammars, Grammar.regex("hi( the)+|é"))}
    assert pieces == {"h", "hi", "<0x68>", "<0xC3>"}
    assert {tokenizer.backend.id_to_token(token) for token in allowed(grammars, Grammar.regex(" [th].*"))} == {
        "▁",
        "▁t",
        "▁the",
        "▁hi",
        "<0x20>",
    }


def test_ends_beside_the_models_own_are_allowed_in_complete_answers_only(folder):
    grammars = Grammars(load_tokenizer(str(folder)), frozenset({tiny.EOS, tiny.TURN_END}))
    start = grammars.start(Grammar.regex("a?b?"))  # complete from the start
    grammars.fill([start])
    grammars.wait()
    for ends in (frozenset({tiny.EOS, tiny.TURN_END}), frozenset({3}), frozenset({3, tiny.EOS}), frozenset()):
        bits = np.unpackbits(grammars.allowed(start, ends, 1000).view(np.uint8), bitorder="little")
        assert {token for token in range(len(tiny.SPECIAL_TOKENS)) if bits[token]} == ends
    unfinished = grammars.start(Grammar.regex("ab"))
    grammars.fill([unfinished])
    grammars.wait()
    bits = np.unpackbits(grammars.allowed(unfinished, frozenset({3}), 1000).view(np.uint8), bitorder="little")
    assert not bits[: len(tiny.SPECIAL_TOKENS)].any()


def test_an_answer_shorter_than_min_tokens_goes_on_while_its_grammar_can(folder):
    chosen = Sampling(max_tokens=40, min_tokens=20, temperature=1.5)
    engine = load(folder)
    endless, bounded = (replace(chosen, grammar=Grammar.regex(pattern)) for pattern in ("[ab]{3,}", "[ab]{3,8}"))
    rows = [Request(key, PROMPTS[key % 4], endless if key < 10 else bounded) for key in range(20)]
    for key, completion in run(engine, rows).items():
        assert len(completion.tokens) > 20 if key < 10 else len(completion.tokens) <= 8
        assert completion.finish_reason == "stop" or key < 10


def test_min_tokens_leaves_a_grammar_the_token_it_needs(folder):
    """The only token that may follow is one that ends answers: it is taken and ends nothing yet."""
    engine = load(folder, forcing=False)
    (letter,) = engine.tokenizer.encode(["a"], False)[0]
    chosen = Sampling(max_tokens=12, min_tokens=5, stop_token_ids=(letter,), grammar=Grammar.regex("a{8}"))
    for completion in run(engine, [Request(key, PROMPTS[0], chosen) for key in range(5)]).values():
        assert completion.tokens == [letter] * 6
        assert completion.finish_reason == "stop"
