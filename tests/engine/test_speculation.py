"""Speculation on tiny models: with any drafter, any option and any limits the output is the one without."""

import functools
import json
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from drafters import adversaries, scripted
from other_logits import change_logits

from batchgen import kernels
from batchgen.engine import Engine, Grammar, Request, Sampling, outcomes
from batchgen.engine import engine as engine_module
from batchgen.engine.draft.training import Plan, Text, examples, train, write_heads
from batchgen.engine.spec import ModelError

TOKENS = 288
KINDS = "ngram", "suffix", "auto", "layer_skip", "draft", "self", "medusa", "draft, auto", "medusa, auto"
CAREFUL = "auto", "draft, auto", "medusa, auto"  # kinds that may find that drafts do not pay
FIELDS = {
    "name": {"type": "string", "maxLength": 5},
    "kind": {"enum": ["the fox", "the dog"]},
    "is": {"type": "boolean"},
}
SCHEMA = Grammar.json_schema(
    {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
)

OPTIONS = {
    "greedy": Sampling(max_tokens=16, temperature=0),
    "greedy to the end": Sampling(max_tokens=16, temperature=0, ignore_eos=True),
    "sampled": Sampling(max_tokens=12, temperature=0.8, seed=5),
    "filters": Sampling(max_tokens=12, temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
    "n": Sampling(max_tokens=10, temperature=1.0, n=3),
    "penalties": Sampling(
        max_tokens=16, temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "sampled penalties": Sampling(max_tokens=12, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3),
    "min tokens": Sampling(max_tokens=16, temperature=0, min_tokens=5, stop_token_ids=tuple(range(6, 200))),
    "stop ids": Sampling(max_tokens=16, temperature=0, stop_token_ids=tuple(range(6, 60))),
    "logprobs": Sampling(max_tokens=10, temperature=0.7, logprobs=5),
    "own logprob": Sampling(max_tokens=10, temperature=0, logprobs=0),
    "one token": Sampling(max_tokens=1, temperature=0),
    "stop strings": Sampling(max_tokens=16, temperature=0, ignore_eos=True, stop=("8", "D", "the")),
    "sampled stop strings": Sampling(max_tokens=16, temperature=0.8, ignore_eos=True, stop=("8", "t", "the f")),
    "schema": Sampling(max_tokens=64, temperature=0, grammar=SCHEMA),
    "sampled schema, n": Sampling(max_tokens=64, temperature=1.2, n=2, grammar=SCHEMA),
    "schema, logprobs": Sampling(max_tokens=64, temperature=0.7, logprobs=1, grammar=SCHEMA),
    "regex, penalties, min tokens": Sampling(
        max_tokens=16, temperature=0.9, repetition_penalty=1.3, min_tokens=6, grammar=Grammar.regex("[a-d]{2,}( the)*")
    ),
    "lark": Sampling(max_tokens=16, temperature=0, grammar=Grammar.lark('start: "jumps " ("lazy " | "dog ")+ "."')),
}


def prompts() -> list[list[int]]:
    """Shared starts, repetitions that invite copying, a single token."""
    start = tiny.random_prompt(21, seed=1)
    repeated = tiny.random_prompt(6, seed=2)
    found = [start + tiny.random_prompt(3 + i, seed=10 + i) for i in range(4)]
    return [*found, repeated * 5, start + repeated * 3, start[:1], tiny.random_prompt(50, seed=4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


def load(folder, **settings) -> Engine:
    return Engine.load(
        str(folder), device="cpu", dtype="float32", **{"memory": "4MiB", "speculation": "off", **settings}
    )


def requests_of(sampling: Sampling) -> list[Request]:
    return [Request(key, prompt, sampling) for key, prompt in enumerate(prompts())]


def outcome(engine: Engine, requests) -> dict:
    finished = {completion.key: completion for completion in engine.run(requests)}
    assert all(completion.error is None for completion in finished.values())
    return {
        key: [(sample.tokens, sample.finish_reason) for sample in completion.samples]
        for key, completion in sorted(finished.items())
    }


class Oracle:
    """Knows the answers of a run without drafts."""

    def __init__(self, requests, answers) -> None:
        self.texts = [[*request.prompt, *tokens] for request in requests for tokens, _ in answers[request.key]]

    def __call__(self, tokens: list[int], prompt_length: int) -> int:
        known = next((t for t in self.texts if len(t) > len(tokens) and t[: len(tokens)] == tokens), None)
        return 9 if known is None else known[len(tokens)]


def with_script(monkeypatch, guess, lengths) -> None:
    make = scripted(guess, lengths, TOKENS)
    monkeypatch.setattr(engine_module, "new_speculation", lambda *given: make(given[-1]))


@pytest.fixture(scope="module")
def plain(folder):
    """Option name -> requests and their answers without speculation."""
    engine = load(folder)
    return {name: (requests_of(sampling), outcome(engine, requests_of(sampling))) for name, sampling in OPTIONS.items()}


@pytest.fixture(scope="module")
def engines(folder, draft_folder, heads_folder):
    """Kind of speculation -> an engine, loaded once."""
    with_path = {
        "draft": {"kind": "draft", "model": str(draft_folder), "tokens": 3},
        "self": {"kind": "draft", "model": "self", "tokens": 3},
        "medusa": {"kind": "medusa", "path": str(heads_folder)},
        "draft, auto": {"kind": "draft", "model": str(draft_folder), "policy": "auto"},
        "medusa, auto": {"kind": "medusa", "path": str(heads_folder), "policy": "auto"},
    }

    def make(kind: str) -> Engine:
        return load(folder, speculation=with_path.get(kind, kind), block_size=4)

    return functools.cache(make)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    """Another family, other weights, a shorter context, a wider head; the same tokenizer."""
    return tiny.tiny_model(
        "qwen3",
        tmp_path_factory.mktemp("draft"),
        seed=3,
        max_position_embeddings=48,
        vocab_size=320,
        num_hidden_layers=1,
    )


def heads_of(folder, out, requests, answers, epochs):
    """Three heads fitted to the answers; without epochs, as they start."""
    engine = load(folder)
    texts = [Text(request.prompt, tokens) for request in requests for tokens, _ in answers[request.key]]
    plan = Plan(heads=3, epochs=max(1, epochs), rate=1e-2 if epochs else 0.0)
    known = examples(engine.model, kernels.load("cpu"), texts, plan.heads)
    write_heads(out, train(engine.model, known, known, plan), str(folder))
    return out


@pytest.fixture(scope="module")
def heads_folder(folder, plain, tmp_path_factory):
    """Heads that know the greedy answers by heart."""
    return heads_of(folder, tmp_path_factory.mktemp("heads"), *plain["greedy to the end"], epochs=150)


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_with_every_option_gives_what_off_gives(engines, plain, name, kind):
    requests, expected = plain[name]
    engine = engines(kind)
    assert outcome(engine, requests) == expected
    assert outcome(engine, iter(requests[::-1])) == expected


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("guess", ["right", "wrong", "random", "sometimes", "illegal"])
def test_adversaries_change_nothing_but_speed(engines, plain, name, guess, monkeypatch):
    requests, expected = plain[name]
    with_script(monkeypatch, adversaries(Oracle(requests, expected), TOKENS)[guess], [3, 8, 1])
    engine = engines("off")
    assert outcome(engine, requests) == expected
    statistics = engine.statistics
    if guess == "wrong":
        assert statistics.accepted_tokens == 0
    if name != "one token":
        assert statistics.drafted_tokens > 0
        if guess in ("right", "sometimes"):
            assert statistics.accepted_tokens > 0


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_tokens": 7, "block_size": 1},
        {"max_batch_tokens": 40, "block_size": 16, "prefix_sharing": False},
        {"max_batch_tokens": 64, "block_size": 4, "max_sequences": 2},
    ],
    ids=lambda limits: str(limits["max_batch_tokens"]),
)
@pytest.mark.parametrize("name", ["greedy to the end", "n", "sampled penalties"])
def test_limits_do_not_matter(folder, plain, name, limits, monkeypatch):
    requests, expected = plain[name]
    with_script(monkeypatch, adversaries(Oracle(requests, expected), TOKENS)["sometimes"], [5, 2, 8])
    engine = load(folder, **limits)
    assert outcome(engine, requests) == expected
    assert engine.statistics.accepted_tokens > 0


def test_preempted_rows_with_drafts_end_as_without(folder, monkeypatch):
    sampling = Sampling(max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=(tiny.BOS,))
    requests = [Request(key, tiny.random_prompt(6, seed=50 + key), sampling) for key in range(12)]
    # answers that end at once make the forecast small, so that the rows are let in too early
    stop = replace(sampling, stop_token_ids=tuple(range(TOKENS)))
    short = [Request(1000 + i, [6 + i], stop) for i in range(64)]
    engine = load(folder)
    expected = outcome(engine, requests)
    with_script(monkeypatch, adversaries(Oracle(requests, expected), TOKENS)["sometimes"], [5, 2, 8])
    shape = engine.model.kv_shape()
    engine = load(folder, block_size=4, memory=shape.bytes_per_token * 4 * 28, max_batch_tokens=96)
    found = outcome(engine, iter(short + requests))
    assert {key: found[key] for key in expected} == expected
    assert engine.statistics.preemptions > 0
    assert engine.statistics.accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_rows_of_every_drafter_end_as_without(engines, kind, monkeypatch):
    """Sampled, so that the noise of a place is drawn again; rows that come behind others have their like to copy."""
    engine = engines(kind)
    sampling = Sampling(max_tokens=24, temperature=0.6, ignore_eos=True, stop_token_ids=(tiny.BOS,), seed=3)
    requests = [Request(key, tiny.random_prompt(3, seed=50 + key % 6) * 2, sampling) for key in range(12)]
    stop = replace(sampling, stop_token_ids=tuple(range(TOKENS)))
    short = [Request(1000 + i, [6 + i], stop) for i in range(64)]
    expected = outcome(engines("off"), iter(requests))
    monkeypatch.setattr(engine, "_num_blocks", 28)
    found = outcome(engine, iter(short + requests))
    assert {key: found[key] for key in expected} == expected
    assert engine.statistics.preemptions > 0
    assert engine.statistics.drafted_tokens > 0 or kind in CAREFUL


@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_at_the_context_end(engines, kind):
    """Each row may fill the context to its last token; a draft model's own context ends long before."""
    engine, plain_engine = engines(kind), engines("off")
    length, part = engine.context_length, tiny.random_prompt(9, seed=2)
    filled = [(part * 60)[: length - left] for left in (9, 3, 1)] + [tiny.random_prompt(length - 9, seed=5)]
    requests = [
        Request(key, prompt, Sampling(max_tokens=length - len(prompt), temperature=temperature, ignore_eos=True))
        for key, (prompt, temperature) in enumerate((one, hot) for one in filled for hot in (0.0, 0.7))
    ]
    assert outcome(engine, requests) == outcome(plain_engine, requests)
    assert engine.statistics.drafted_tokens > 0 or kind in (*CAREFUL, "draft")


@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_leaves_logprobs_as_they_are(engines, kind):
    requests = requests_of(replace(OPTIONS["logprobs"], max_tokens=16))
    expected, found = ({one.key: one for one in engines(name).run(requests)} for name in ("off", kind))
    for key, completion in found.items():
        pairs = zip(completion.logprobs, expected[key].logprobs, strict=True)
        assert [one.token_id for one in completion.logprobs] == completion.tokens == expected[key].tokens
        for one, other in pairs:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-4)


def test_every_option_shows(plain):
    """None of them is without effect on these prompts, so that equality says something about it."""
    answers = {name: [sample for samples in found.values() for sample in samples] for name, (_, found) in plain.items()}
    reasons = {name: {reason for _, reason in found} for name, found in answers.items()}
    assert reasons["stop strings"] == reasons["sampled stop strings"] == {"stop", "length"}
    for name in ("schema", "sampled schema, n", "schema, logprobs", "regex, penalties, min tokens", "lark"):
        assert "stop" in reasons[name], name
    for name in set(OPTIONS) - {"greedy", "greedy to the end", "min tokens", "one token", "own logprob"}:
        assert answers[name] != answers["greedy"], name
    assert answers["min tokens"] != answers["stop ids"]


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_are_those_without_drafts(folder, top, monkeypatch):
    sampling = Sampling(max_tokens=10, temperature=0, logprobs=top)
    requests = requests_of(sampling)
    engine = load(folder)
    expected = {completion.key: completion for completion in engine.run(requests)}
    answers = {key: [(c.tokens, "")] for key, c in expected.items()}
    with_script(monkeypatch, adversaries(Oracle(requests, answers), TOKENS)["sometimes"], [4])
    for completion in engine.run(requests):
        other = expected[completion.key]
        assert len(completion.logprobs) == len(completion.tokens)
        for left, right in zip(completion.logprobs, other.logprobs, strict=True):
            assert left.token_id == right.token_id
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [token for token, _ in left.top] == [token for token, _ in right.top]
            assert len(left.top) == top
    assert engine.statistics.accepted_tokens > 0


def test_stop_strings_inside_accepted_drafts(folder, monkeypatch):
    prompt = tiny.random_prompt(5, seed=8)
    free = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    engine = load(folder)
    (whole,) = engine.run([Request(0, prompt, free)])
    text = engine.tokenizer.decode(whole.tokens)
    found = {text[at : at + size] for size in (1, 3, 5) for at in range(len(text) - size)}
    pieces = sorted(piece for piece in found if "\ufffd" not in piece)
    requests = [Request(key, prompt, replace(free, stop=(piece,))) for key, piece in enumerate(pieces)]
    expected = outcome(engine, iter(requests))
    with_script(monkeypatch, Oracle([Request(0, prompt, free)], {0: [(whole.tokens, "")]}), [7])
    assert outcome(engine, iter(requests)) == expected
    assert engine.statistics.accepted_tokens > 0
    assert engine.statistics.output_tokens == sum(len(tokens) for ((tokens, _),) in expected.values())


def test_an_end_token_drafted_everywhere_ends_nothing_early(folder, monkeypatch):
    sampling = Sampling(max_tokens=16, min_tokens=5, temperature=0)
    engine = load(folder)
    expected = outcome(engine, requests_of(sampling))
    with_script(monkeypatch, lambda tokens, prompt_length: tiny.EOS, [6])
    assert outcome(engine, requests_of(sampling)) == expected


def test_drafts_are_clipped_at_the_context_end(folder, monkeypatch):
    engine = load(folder)
    length = engine.model.spec.context_length
    request = Request(0, tiny.random_prompt(length - 6), Sampling(max_tokens=6, temperature=0, ignore_eos=True))
    expected = outcome(engine, [request])
    for guess in ("right", "wrong"):
        with_script(monkeypatch, adversaries(Oracle([request], expected), TOKENS)[guess], [8])
        assert outcome(engine, [request]) == expected
        assert engine.statistics.drafted_tokens > 0


def test_a_draft_model_of_another_tokenizer_is_refused(folder, draft_folder, tmp_path):
    shutil.copytree(draft_folder, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"engine\.speculation: .* another vocabulary .* same family"):
        load(folder, speculation={"kind": "draft", "model": str(tmp_path / "other")})


def test_a_draft_model_with_other_end_tokens_or_too_small_a_head_is_refused(folder, draft_folder, tmp_path):
    other = shutil.copytree(draft_folder, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|end|>"}))
    with pytest.raises(ModelError, match=r"engine\.speculation: .* has other end tokens .* same family"):
        load(folder, speculation={"kind": "draft", "model": str(other)})
    small = tiny.tiny_model("qwen3", tmp_path / "small", vocab_size=TOKENS - 8)
    with pytest.raises(ModelError, match=rf"has a head of {TOKENS - 8} tokens, the tokenizer {TOKENS}"):
        load(folder, speculation={"kind": "draft", "model": str(small)})


def test_the_target_as_its_own_draft_model_is_accepted_nearly_always(folder, monkeypatch):
    """Its pages follow the sequences: through rejections, preemptions and shared prompts."""
    requests = requests_of(replace(OPTIONS["greedy to the end"], max_tokens=40))
    engine = load(folder, speculation={"kind": "draft", "model": str(folder), "tokens": 4}, block_size=4)
    assert outcome(engine, requests) == outcome(load(folder), requests)
    statistics = engine.statistics
    assert statistics.accepted_tokens == statistics.drafted_tokens > 100


def test_an_exit_behind_nearly_all_layers_is_found_and_accepted(tmp_path):
    """Layers that add nothing but the first: every exit is right, and the cheapest is taken."""
    folder = tiny.tiny_model("llama3", tmp_path, num_hidden_layers=8)
    engine = load(folder, speculation="layer_skip")
    for attention, mlp in engine.model._layers[1:]:
        attention.output._packed.numbers.zero_()
        mlp.down._packed.numbers.zero_()
    requests = requests_of(Sampling(max_tokens=60, temperature=0, ignore_eos=True))
    found = outcome(engine, requests)
    statistics = engine.statistics
    assert statistics.accepted_tokens == statistics.drafted_tokens > 200
    plain = load(folder)
    for attention, mlp in plain.model._layers[1:]:
        attention.output._packed.numbers.zero_()
        mlp.down._packed.numbers.zero_()
    assert outcome(plain, requests) == found


def test_trained_heads_are_accepted_and_untrained_ones_are_not(folder, plain, engines, tmp_path):
    requests, expected = plain["greedy to the end"]
    shares = {}
    untrained = heads_of(folder, tmp_path, requests, expected, epochs=0)
    for name, engine in (
        ("trained", engines("medusa")),
        ("untrained", load(folder, speculation={"kind": "medusa", "path": str(untrained)})),
    ):
        assert outcome(engine, requests) == expected
        shares[name] = engine.statistics.accepted_tokens / engine.statistics.drafted_tokens
    assert shares["untrained"] < 0.1
    assert shares["trained"] > 0.5
    assert engines("medusa").statistics.steps < 0.7 * engine.statistics.steps
    always = engine.statistics.drafted_tokens
    careful = load(folder, speculation={"kind": "medusa", "path": str(untrained), "policy": "auto"})
    assert outcome(careful, requests) == expected
    assert careful.statistics.drafted_tokens < always / 2


def test_the_exactness_tests_can_fail(folder, plain, monkeypatch):
    """Keys of wrong guesses that are taken for right ones show up at once."""
    requests, expected = plain["greedy to the end"]
    with_script(monkeypatch, adversaries(Oracle(requests, expected), TOKENS)["wrong"], [3])
    monkeypatch.setattr(outcomes, "num_accepted", lambda draft, results: min(1, len(draft)))
    assert outcome(load(folder), requests) != expected


def test_the_distribution_is_that_without_drafts(tmp_path):
    """Chi-square over the whole vocabulary: sampled second tokens behind a drafter that loves one token."""
    folder = tiny.tiny_model("llama3", tmp_path)
    engine = load(folder, max_sequences=64)
    prompt, loved = tiny.random_prompt(4, seed=3), 6

    def flat(logits):
        logits = logits * 0.15
        logits[..., loved] += 3
        return logits

    change_logits(engine, flat)
    sampling = Sampling(max_tokens=2, temperature=1.0, ignore_eos=True, n=1000)
    requests = [Request(key, prompt, replace(sampling, seed=key)) for key in range(5)]
    expected = outcome(engine, requests)
    with pytest.MonkeyPatch.context() as patch:
        with_script(patch, lambda tokens, prompt_length: loved, [1])
        found = outcome(engine, requests)
    assert found == expected
    assert engine.statistics.accepted_tokens > 200
    first, following = (torch.softmax(flat(logits)[..., :TOKENS], -1) for logits in _logits_behind(folder, prompt))
    chances = first @ following  # of a second token, whatever the first is
    seconds = [tokens[1] for samples in found.values() for tokens, _ in samples]
    limit = TOKENS - 1 + 4 * (2 * (TOKENS - 1)) ** 0.5  # four standard deviations above the mean
    assert (chances * len(seconds)).min() >= 5
    assert _chi_square(seconds, chances) < limit
    biased = [loved if place % 20 == 0 else token for place, token in enumerate(seconds)]  # wrong drafts that were kept
    assert _chi_square(biased, chances) > limit


def _logits_behind(folder, prompt):
    """[V] behind the prompt, and [TOKENS, V] behind the prompt and each token of the vocabulary."""
    following = [tiny.reference_logits(folder, [*prompt, token])[-1] for token in range(TOKENS)]
    return tiny.reference_logits(folder, prompt)[-1], torch.stack(following)


def _chi_square(tokens, chances):
    counts, expected = torch.bincount(torch.tensor(tokens), minlength=TOKENS), chances * len(tokens)
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("kind", ["layer_skip", "draft"])
def test_nothing_of_a_run_stays_with_what_drafted(engines, plain, kind):
    engine = engines(kind)
    models = engine._draft_models
    runners = [*models.exits.values(), *([models.model] if models.model else [])]
    outcome(engine, plain["greedy"][0])
    assert not any(runner.latest for runner in runners)
    for runner in runners:
        runner.failures = 5
    outcome(engine, plain["one token"][0])
    assert not any(runner.failures for runner in runners)


def test_no_state_of_a_run_stays_with_heads(engines, plain):
    engine = engines("medusa")
    outcome(engine, plain["greedy"][0])
    states = engine._draft_models.heads.states
    assert engine.statistics.drafted_tokens
    assert not states._places
    assert not states._hidden.numel()


def test_a_model_of_one_layer_cannot_skip_any(tmp_path):
    folder = tiny.tiny_model("llama3", tmp_path, num_hidden_layers=1)
    refused = r"^engine\.speculation: layer_skip needs a model of two layers or more; use auto$"
    with pytest.raises(ModelError, match=refused):
        load(folder, speculation="layer_skip")
    engine = load(folder)
    with pytest.raises(ModelError, match=refused):
        engine.adopt(engine.settings.model_copy(update={"speculation": "layer_skip"}))
