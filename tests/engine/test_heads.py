"""Medusa heads: the files of public checkpoints, what is refused, which token each head learns from which state."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from batchgen import kernels
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.decoder import load_decoder
from batchgen.engine.draft.heads import load_heads
from batchgen.engine.draft.training import NONE, Plan, Text, examples, split, train
from batchgen.engine.spec import ModelError

HIDDEN, VOCABULARY = 64, tiny.VOCABULARY


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tiny.tiny_model("llama3", tmp_path_factory.mktemp("llama3"))
    return load_decoder(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"), kernels.load("cpu"))


def tensors_of(num_heads: int, num_layers: int, *, bias: bool = True, projection: bool = True) -> dict:
    noise = torch.Generator().manual_seed(num_heads)
    found = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=noise)
            if bias:
                found[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=noise)
        if projection:
            found[f"{head}.{num_layers}.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=noise)
    return found


def load(folder: Path, decoder):
    return load_heads(str(folder), decoder, kernels.load("cpu"))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("projection", [True, False])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_heads_of_a_public_checkpoint(decoder, tmp_path, name, projection, bias, num_layers):
    tensors = tensors_of(3, num_layers, bias=bias, projection=projection)
    (torch.save if name.endswith(".pt") else save_file)(tensors, tmp_path / name)
    heads = load(tmp_path, decoder)
    assert len(heads) == 3
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    for index, head in enumerate(heads):
        expected = states.double()
        for layer in range(num_layers):
            linear = torch.nn.Linear(HIDDEN, HIDDEN, bias=bias, dtype=torch.float64)
            linear.weight.data.copy_(tensors[f"{index}.{layer}.linear.weight"])
            if bias:
                linear.bias.data.copy_(tensors[f"{index}.{layer}.linear.bias"])
            expected = expected + torch.nn.functional.silu(linear(expected))
        own = tensors.get(f"{index}.{num_layers}.weight")
        expected = expected @ (decoder.head_weight() if own is None else own).double().T
        torch.testing.assert_close(head.logits(states).double(), expected, rtol=1e-4, atol=1e-3)


def test_the_config_bounds_how_many_heads_are_used(decoder, tmp_path):
    save_file(tensors_of(4, 1), tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    assert len(load(tmp_path, decoder)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("1.0.linear.weight"), r"the tensors of head 1 leave a gap"),
        (lambda t: [t.pop(name) for name in list(t) if name.startswith("1.")], r"the tensors of head 1 leave a gap"),
        (lambda t: t.update({"1.3.weight": t.pop("1.1.weight")}), r"the tensors of head 1 leave a gap"),
        (lambda t: t.update({"fc.weight": torch.zeros(2)}), r"tensor fc\.weight is none of a Medusa head"),
        (
            lambda t: t.update({"0.0.linear.weight": torch.zeros(32, 32)}),
            r"0\.0\.linear\.weight is \[32, 32\], the model needs \[64, 64\]; use heads that were trained for this",
        ),
        (
            lambda t: t.update({"0.1.weight": torch.zeros(7, 64)}),
            r"0\.1\.weight is \[7, 64\], the model needs \[300, 64",
        ),
        (lambda t: t.clear(), r"holds no tensor"),
    ],
)
def test_heads_that_do_not_fit_are_refused(decoder, tmp_path, change, message):
    tensors = tensors_of(3, 1)
    change(tensors)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path, decoder)


@pytest.mark.parametrize("value", [0, 4, "2", None])
def test_a_config_that_asks_for_other_heads_is_refused(decoder, tmp_path, value):
    save_file(tensors_of(3, 1), tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": value}))
    with pytest.raises(ModelError, match=r"config\.json: medusa_num_heads is .*, but .* has 3 heads"):
        load(tmp_path, decoder)


def test_a_directory_without_heads_is_refused(decoder, tmp_path):
    with pytest.raises(ModelError, match=r"has none of medusa_lm_head\.safetensors, medusa_lm_head\.pt"):
        load(tmp_path, decoder)


def test_each_head_learns_from_the_state_that_drew_the_token_before_its_first(decoder):
    texts = [Text(tiny.random_prompt(9, seed=1), [10, 11, 12, 13]), Text(tiny.random_prompt(9, seed=1)[:5], [20, 21])]
    found = examples(decoder, kernels.load("cpu"), [*texts, Text([7], [8])], 3)
    assert found.targets.tolist() == [[21, NONE, NONE], [11, 12, 13], [12, 13, NONE], [13, NONE, NONE]]
    drawn = decoder.logits(found.hidden)
    for row, text, place in ((0, texts[1], 5), (1, texts[0], 9), (3, texts[0], 11)):
        tokens = [*text.prompt, *text.answer][:place]
        (alone,) = examples(decoder, kernels.load("cpu"), [Text(tokens, [1, 2])], 1).hidden
        torch.testing.assert_close(found.hidden[row], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drawn[row], decoder.logits(alone[None])[0], rtol=1e-4, atol=1e-3)


def texts_of(count: int) -> list[Text]:
    return [Text(tiny.random_prompt(4, seed=seed), tiny.random_prompt(6, seed=100 + seed)) for seed in range(count)]


def test_the_same_seed_trains_the_same_heads(decoder):
    known = examples(decoder, kernels.load("cpu"), texts_of(60), 2)
    first, again, other = (train(decoder, known, known, Plan(heads=2, epochs=2, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.weights, again.weights)
    assert torch.equal(first.biases, again.biases)
    assert not torch.equal(first.weights, other.weights)
    assert first.accuracy == again.accuracy


def test_every_answer_is_learned_from_or_held_out():
    texts = texts_of(20)
    learn, measure = split(texts, Plan(seed=3))
    assert len(measure) == 2
    assert sorted(text.prompt for text in learn + measure) == sorted(text.prompt for text in texts)
    with pytest.raises(ValueError, match="two answers at least"):
        split(texts[:1], Plan())


def test_answers_of_one_token_teach_nothing(decoder):
    nothing = examples(decoder, kernels.load("cpu"), [Text([7], [8]), Text([9], [8])], 3)
    with pytest.raises(ValueError, match="no answer is longer than a token"):
        train(decoder, nothing, nothing, Plan())
