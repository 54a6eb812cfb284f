"""Layers that checkpoints ship to predict a further token: they draft what the reference does, and change no answer."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_mimo import SOURCE, Reference, tiny_mimo

from batchgen.engine import Engine, Grammar, Request, Sampling
from batchgen.engine.draft.model import ModelDrafter
from batchgen.engine.spec import ModelError

OPTIONS = {
    "greedy": Sampling(max_tokens=12, temperature=0, ignore_eos=True),
    "sampled": Sampling(max_tokens=12, temperature=0.8, n=2),
    "penalties": Sampling(max_tokens=12, temperature=0.5, repetition_penalty=1.3, min_tokens=4),
    "regex": Sampling(max_tokens=20, temperature=0.9, grammar=Grammar.regex("[a-d]{2,9}( the)+")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_mimo(tmp_path_factory.mktemp("mimo"))


def load(folder, speculation, **settings) -> Engine:
    chosen = {"memory": "4MiB", "block_size": 4, "speculation": speculation, **settings}
    return Engine.load(str(folder), device="cpu", dtype="float32", **chosen)


def mtp(tokens: int, **more) -> dict:
    return {"kind": "mtp", "tokens": tokens, **more}


def requests_of(sampling: Sampling) -> list[Request]:
    """Prompts that share, branch inside blocks, or stand alone."""
    start = tiny.random_prompt(18, seed=1)
    found = [start[:length] + tiny.random_prompt(5, seed=length) for length in (18, 18, 17, 15, 6, 0)]
    return [Request(key, prompt, sampling) for key, prompt in enumerate([*found, start, start[:1]])]


def answers(engine: Engine, requests) -> dict:
    found = {one.key: one for one in engine.run(requests)}
    assert all(one.error is None for one in found.values())
    return {
        key: [(sample.tokens, sample.finish_reason) for sample in one.samples] for key, one in sorted(found.items())
    }


@pytest.fixture
def drafts(monkeypatch) -> list[tuple[list[int], tuple[int, ...]]]:
    """What is drafted behind which tokens."""
    seen = []
    propose = ModelDrafter.propose

    def watched(drafter, wanted):
        found = propose(drafter, wanted)
        seen.extend((list(sequence.tokens), draft.tokens) for (sequence, _), draft in zip(wanted, found, strict=True))
        return found

    monkeypatch.setattr(ModelDrafter, "propose", watched)
    return seen


@pytest.mark.parametrize("limits", [{}, {"max_batch_tokens": 9}, {"max_sequences": 2, "block_size": 16}], ids=str)
def test_it_drafts_what_the_reference_says(folder, drafts, limits):
    reference = Reference(folder)
    answers(load(folder, mtp(1), **limits), iter(requests_of(OPTIONS["greedy"])))
    made = [(tokens, draft) for tokens, draft in drafts if draft]
    assert len(made) > 40
    for tokens, (token,) in made:
        logits = reference.further(tokens)[:288]
        assert logits[token] == pytest.approx(float(logits.max()), abs=1e-3)


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("how", [mtp(1), mtp(3), mtp(2, policy="auto")], ids=str)
def test_it_changes_no_answer(folder, name, how):
    requests = requests_of(OPTIONS[name])
    engine = load(folder, how)
    assert answers(engine, requests) == answers(load(folder, "off"), requests)
    assert engine.statistics.drafted_tokens > 0 or "policy" in how


def test_preempted_rows_end_as_without(folder, monkeypatch):
    sampling = Sampling(max_tokens=24, temperature=0.6, ignore_eos=True, stop_token_ids=(tiny.BOS,))
    stop = Sampling(max_tokens=24, temperature=0, stop_token_ids=tuple(range(288)))
    short = [Request(1000 + i, [6 + i], stop) for i in range(64)]  # the forecast is small: too many are let in
    requests = [Request(key, tiny.random_prompt(6, seed=key), sampling) for key in range(12)]
    engine, expected = load(folder, mtp(2)), answers(load(folder, "off"), requests)
    monkeypatch.setattr(engine, "_num_blocks", 28)
    found = answers(engine, iter(short + requests))
    assert {key: found[key] for key in expected} == expected
    assert engine.statistics.preemptions > 0
    assert engine.statistics.drafted_tokens > 0


def test_a_layer_that_knows_the_further_token_is_always_right(tmp_path):
    """Beyond the first token it reads its own state in the target's place, which tells it as much."""
    folder = tiny_mimo(tmp_path, copying=True)
    plain = load(folder, "off")
    requests = requests_of(Sampling(max_tokens=40, temperature=0, ignore_eos=True))
    expected = answers(plain, requests)
    for tokens in (1, 3):
        engine = load(folder, mtp(tokens))
        assert answers(engine, requests) == expected
        statistics = engine.statistics
        assert statistics.accepted_tokens == statistics.drafted_tokens > 100
        assert statistics.steps < 1.3 * plain.statistics.steps / (1 + tokens)


@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"weights": "int4"}, {"kv_cache": "int8"}], ids=str)
def test_the_target_may_be_in_any_format(tmp_path, settings):
    """The layer is in the compute dtype, and draws by the target's own head from states as the target rounds them."""
    folder = tiny_mimo(tmp_path, copying=True)
    requests = requests_of(Sampling(max_tokens=24, temperature=0, ignore_eos=True))
    engine = load(folder, mtp(2), **settings)
    assert answers(engine, requests) == answers(load(folder, "off", **settings), requests)
    assert engine.statistics.accepted_tokens > 0.9 * engine.statistics.drafted_tokens > 50


def test_the_model_itself_is_qwen2(folder, tmp_path):
    other = tiny.tiny_model("qwen2", tmp_path)
    requests = requests_of(OPTIONS["sampled"])
    assert answers(load(folder, "off"), requests) == answers(load(other, "off"), requests)


def test_a_model_without_such_a_layer_is_refused(tmp_path):
    refused = r"^engine\.speculation: the model ships no layer that predicts a further token .*use auto$"
    with pytest.raises(ModelError, match=refused):
        load(tiny.tiny_model("qwen2", tmp_path / "qwen2"), mtp(1))
    none = tiny_mimo(tmp_path / "mimo")
    config = json.loads((none / "config.json").read_text())
    (none / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=refused):
        load(none, mtp(1))


@pytest.mark.parametrize("change", [None, torch.ones(3)], ids=["missing", "of another shape"])
def test_a_layer_that_is_not_whole_is_refused_by_its_tensor(tmp_path, change):
    folder, name = tiny_mimo(tmp_path), f"{SOURCE}.input_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors if change is None else {**tensors, name: change}, folder / "model.safetensors")
    load(folder, "off")
    with pytest.raises(ModelError, match=rf"^engine\.speculation: tensor {name} is missing or of another shape"):
        load(folder, mtp(1))
