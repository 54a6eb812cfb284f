"""The trie of choices, its probabilities, and that one pass gives what scoring every choice by itself gives."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine import Engine, Grammar, Request, Sampling, choices
from batchgen.engine.choices import END, MOST_FED, choice_trie

TEXTS = ["the", "the fox", "then", "over the lazy dog", "q"]
GRAMMAR = Grammar.choices(TEXTS)
PROMPTS = [tiny.random_prompt(3 + 9 * at, seed=at) for at in range(6)]


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=8, unique=True), st.randoms())
def test_probabilities_are_products_along_the_way(texts, random):
    trie = choice_trie(texts, [list(text.encode()) for text in texts])
    open_ended = {at for at, text in enumerate(texts) if any(o != text and o.startswith(text) for o in texts)}
    assert trie.open_ended == open_ended
    assert trie.nodes[0] == min(trie.nodes, key=len)
    scored = [node for part in trie.parts for _, node in part.points]
    assert sorted(scored) == list(range(len(trie.nodes)))
    table = {
        (node, token): -random.random() * 9
        for node, wanted in zip(trie.nodes, trie.wanted, strict=True)
        for token in wanted
    }
    scores = [[table[node, token] for token in wanted] for node, wanted in zip(trie.nodes, trie.wanted, strict=True)]
    expected = []
    for at, text in enumerate(texts):
        row = [*text.encode(), END] if at in open_ended else [*text.encode()]
        steps = [table.get((tuple(row[:place]), row[place]), 0.0) for place in range(len(row))]
        assert all(tuple(row[:place]) in trie.nodes for place in range(len(trie.nodes[0]), len(row)))
        expected.append(math.exp(sum(steps)))
    found = trie.probabilities(scores)
    assert sum(found) == pytest.approx(1)
    assert found == pytest.approx([value / sum(expected) for value in expected])


def test_what_all_choices_begin_with_needs_no_scores():
    trie = choice_trie(["a red", "a rod"], [[1, 2, 3], [1, 2, 4, 5]])
    assert trie.nodes == [(1, 2), (1, 2, 4)]
    assert trie.wanted == [[3, 4], [5]]
    assert choice_trie(["a"], [[1, 2]]).nodes == [(1,)]


def test_choices_of_one_token_need_the_prompt_alone():
    assert choice_trie(["a", "b"], [[5], [6]]).nodes == [()]
    assert choice_trie(["a", "ab"], [[5], [5, 6]]).wanted == [[END, 6]]


def test_a_wide_trie_is_scored_in_parts_that_repeat_only_where_they_are_cut():
    words = [(first, second, 7) for first in range(40) for second in range(9)]
    trie = choice_trie([str(word) for word in words], words)
    assert len(trie.nodes) == 1 + 40 + 360
    fed = [len(part.branches.tokens) for part in trie.parts]
    assert max(fed) <= MOST_FED + 1
    assert sum(fed) <= 40 + 360 + len(fed)
    long = choice_trie(["a", "b"], [[1] * 200, [2] * 150])
    assert [len(part.branches.tokens) for part in long.parts] == [199, 149]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


def load(folder: Path, **settings) -> Engine:
    return Engine.load(str(folder), device="cpu", dtype="float32", **{"memory": "1MiB", **settings})


SCORED = Sampling(max_tokens=20, temperature=0, grammar=GRAMMAR, choice_probs=True)


def expected_probabilities(folder: Path, engine: Engine, prompt: list[int], grammar: Grammar = GRAMMAR) -> list[float]:
    """Every choice by itself, in transformers."""
    trie = engine.grammars.trie(grammar)
    totals = []
    for at, option in enumerate(trie.options):
        logits = tiny.reference_logits(folder, [*prompt, *option])[:, : engine.bounds.vocabulary].log_softmax(-1)
        rows = logits[len(prompt) - 1 :]
        total = sum(float(rows[place, token]) for place, token in enumerate(option))
        if at in trie.open_ended:
            total += float(rows[len(option), [tiny.EOS, tiny.TURN_END]].logsumexp(0))
        totals.append(math.exp(total))
    return [total / sum(totals) for total in totals]


@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "max_batch_tokens": 7}, {"prefix_sharing": False}])
def test_one_pass_equals_every_choice_by_itself(folder, settings):
    engine = load(folder, **settings)
    found = {one.key: one for one in engine.run([Request(key, prompt, SCORED) for key, prompt in enumerate(PROMPTS)])}
    for key, prompt in enumerate(PROMPTS):
        expected = expected_probabilities(folder, engine, prompt)
        assert found[key].choice_probs == pytest.approx(expected, abs=1e-5)
        best = expected.index(max(expected))
        assert engine.tokenizer.decode(found[key].tokens) == TEXTS[best]
        assert found[key].finish_reason == "stop"
        assert found[key].usage.prompt_tokens == len(prompt)
        assert found[key].usage.completion_tokens == len(found[key].tokens)
    assert engine.statistics.output_tokens == sum(len(one.tokens) for one in found.values())


def test_prompt_and_choices_are_one_step_in_which_every_edge_is_computed_once(folder):
    engine = load(folder)
    (found,) = engine.run([Request(0, PROMPTS[2], SCORED)])
    trie = engine.grammars.trie(GRAMMAR)
    assert len(trie.nodes) > len(TEXTS)
    edges = len({option[: at + 1] for option in trie.options for at in range(len(option) - 1)})
    open_ended = sum(len(trie.options[at]) == 1 or trie.options[at] in trie.nodes for at in trie.open_ended)
    assert engine.statistics.steps == 1
    assert engine.statistics.fed_tokens <= len(PROMPTS[2]) + edges + open_ended
    assert found.choice_probs is not None


@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "max_batch_tokens": 11}])
def test_parts_together_equal_every_choice_by_itself(folder, settings, monkeypatch):
    monkeypatch.setattr(choices, "MOST_FED", 2)
    engine = load(folder, **settings)
    (found,) = engine.run([Request(0, PROMPTS[2], SCORED)])
    assert len(engine.grammars.trie(GRAMMAR).parts) == 2
    assert found.choice_probs == pytest.approx(expected_probabilities(folder, engine, PROMPTS[2]), abs=1e-5)


def test_choices_that_the_memory_cannot_hold_are_refused(folder):
    bytes_per_token = load(folder).model.kv_shape().bytes_per_token
    engine = load(folder, block_size=16, memory=bytes_per_token * 16 * 2)
    (found,) = engine.run([Request(0, PROMPTS[1], SCORED)])
    assert (found.error.code, found.error.retryable) == ("engine", True)
    assert found.error.message.startswith("choice_probs: prompt and choices take ")


def test_scored_rows_beside_others_and_preempted_ones(folder):
    plain = [Request(100 + at, prompt, Sampling(max_tokens=30, temperature=1)) for at, prompt in enumerate(PROMPTS)]
    scored = [Request(key, prompt, SCORED) for key, prompt in enumerate(PROMPTS)]
    alone = {one.key: one.choice_probs for one in load(folder).run(scored)}
    shape = load(folder).model.kv_shape()
    tight = load(folder, block_size=4, memory=shape.bytes_per_token * 4 * 26, max_batch_tokens=24)
    found = {one.key: one for one in tight.run(iter([*plain[:3], *scored, *plain[3:]]))}
    for key, probabilities in alone.items():
        assert found[key].choice_probs == pytest.approx(probabilities, abs=1e-5)
    answers = {one.key: one.tokens for one in load(folder).run(plain)}
    assert {key: found[key].tokens for key in answers} == answers


def test_equal_rows_are_scored_once_and_samples_are_copies(folder):
    engine = load(folder)
    rows = [Request(key, PROMPTS[2], replace(SCORED, n=2)) for key in range(3)]
    found = list(engine.run(rows))
    assert engine.statistics.duplicates == 2
    assert len({one.choice_probs for one in found}) == 1
    assert [len(one.tokens) for one in found] == [2, 2, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 1.0}, "choice_probs: needs temperature 0"),
        ({"grammar": Grammar.regex("a")}, "choice_probs: needs choices"),
        ({"grammar": None}, "choice_probs: needs choices"),
        ({"logprobs": 1}, "choice_probs: cannot stand beside logprobs"),
        ({"stop": ("a",)}, "choice_probs: cannot stand beside stop"),
        ({"repetition_penalty": 1.2}, "choice_probs: cannot stand beside repetition_penalty"),
        ({"min_tokens": 1}, "choice_probs: cannot stand beside min_tokens"),
    ],
)
def test_what_does_not_go_with_probabilities(values, message):
    with pytest.raises(ValueError, match=message):
        replace(SCORED, **values)


def test_a_choice_longer_than_max_tokens_is_refused(folder):
    (found,) = load(folder).run([Request(0, PROMPTS[0], replace(SCORED, max_tokens=2))])
    assert found.error.code == "bad_params"
    assert "more than max_tokens (2)" in found.error.message
