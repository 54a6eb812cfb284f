"""The comparison of number formats, against transformers and against changes of known size."""

import math
from dataclasses import astuple

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen import kernels
from batchgen.engine import accuracy
from batchgen.engine.accuracy import Candidate, Trace, compare, difference, differences
from batchgen.engine.batch import Batch
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.decoder import load_decoder
from batchgen.engine.kv import KVPages, KVShape
from batchgen.kernels.kv_format import FORMATS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


def candidate(folder, dtype=torch.float32) -> Candidate:
    ops = kernels.load("cpu")
    model = load_decoder(open_checkpoint(str(folder)), dtype, torch.device("cpu"), ops)
    return Candidate(model, ops, model.kv_shape())


TEXTS = [tiny.random_prompt(50, seed=1), tiny.random_prompt(7, seed=2), [9]]


def test_a_model_agrees_with_itself(folder):
    result = compare(candidate(folder), candidate(folder), TEXTS, tiny.VOCABULARY)
    assert result.tokens == 49 + 6
    assert result.agreement == 1
    assert result.divergence == pytest.approx(0, abs=1e-9)
    assert result.perplexity_rise == 0


@pytest.mark.parametrize("tokens_at_once", [5, 16, 1024])
def test_the_loss_is_that_of_transformers(folder, tokens_at_once, monkeypatch):
    monkeypatch.setattr(accuracy, "TOKENS_AT_ONCE", tokens_at_once)
    monkeypatch.setattr(accuracy, "LOGITS_BYTES", 4 * tiny.VOCABULARY * tokens_at_once)
    result = compare(candidate(folder), candidate(folder), TEXTS, tiny.VOCABULARY)
    losses = []
    for text in TEXTS[:2]:
        logits = tiny.reference_logits(folder, text)[:-1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="none").tolist()
    assert result.reference_loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert result.perplexity == pytest.approx(math.exp(result.candidate_loss))


def test_a_changed_model_is_told_by_how_much(folder):
    changed = candidate(folder)
    real = changed.model.logits
    changed.model.logits = lambda hidden: real(hidden) * 0.8
    result = compare(candidate(folder), changed, TEXTS, tiny.VOCABULARY)
    assert result.agreement == 1
    assert result.divergence > 0.01
    changed.model.logits = lambda hidden: real(hidden).roll(1, -1)
    assert compare(candidate(folder), changed, TEXTS, tiny.VOCABULARY).agreement < 0.2


def test_bfloat16_is_close(folder):
    result = compare(candidate(folder), candidate(folder, torch.bfloat16), TEXTS, tiny.VOCABULARY)
    assert 0 < result.divergence < 0.05
    assert abs(result.perplexity_rise) < 0.05


def test_nothing_to_predict_is_an_error(folder):
    with pytest.raises(ValueError, match="longer"):
        compare(candidate(folder), candidate(folder), [[1], []], tiny.VOCABULARY)


def test_what_texts_share_with_the_first_one_is_computed_once_and_alike(folder):
    first = tiny.random_prompt(70, seed=3)
    texts = [first, [*first[:40], *tiny.random_prompt(9, seed=4)], tiny.random_prompt(20, seed=5), first[:33]]
    whole = candidate(folder)
    shared = accuracy.trace(whole, texts)
    assert shared.starts == (0, 32, 0, 16)
    for text, start, hidden in zip(texts, shared.starts, shared.hidden, strict=True):
        (alone,) = accuracy.trace(whole, [text]).hidden
        torch.testing.assert_close(hidden, alone[start:], rtol=1e-5, atol=1e-5)


class Elsewhere:
    """A model on a device that is not the host; of its logits the host has a copy."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.seen: list[torch.device] = []

    def rope_choice(self, length: int) -> int:
        return 0

    def forward(self, batch: Batch, pages: KVPages) -> torch.Tensor:
        fed = (batch.tokens, batch.positions, batch.slots, batch.rope_choice, batch.sampled)
        self.seen += [tensor.device for tensor in (*fed, pages.layer(0).keys.codes)]
        return torch.zeros(len(batch.tokens), 8, device=self.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), tiny.VOCABULARY)


def test_all_that_is_fed_lies_where_the_model_does() -> None:
    model = Elsewhere()
    found = compare(
        *[Candidate(model, kernels.load("cpu"), KVShape(1, 1, 8, FORMATS["float32"]))] * 2, TEXTS, tiny.VOCABULARY
    )
    assert set(model.seen) == {model.device}
    assert found.tokens == 49 + 6


@given(st.lists(st.tuples(st.integers(2, 9), st.integers(0, 8), st.integers(0, 9)), min_size=1, max_size=4))
def test_answers_are_the_tokens_from_their_first_on(shapes: list[tuple[int, int, int]]) -> None:
    """Each shape: tokens of a text, how many of them another text computed, where its answer begins."""
    seeded = torch.Generator().manual_seed(len(shapes))
    texts = [torch.randint(0, 5, (length,), generator=seeded).tolist() for length, _, _ in shapes]
    starts = tuple(min(start, length - 2) for length, start, _ in shapes)
    first = [min(max(begin, 1), length - 1) for length, _, begin in shapes]
    hidden = [
        tuple(torch.randn(len(text) - start, 5, generator=seeded) for text, start in zip(texts, starts, strict=True))
        for _ in range(2)
    ]
    left, right = (Trace(starts, one, lambda numbers: numbers) for one in hidden)
    whole, late = differences(left, right, texts, 5, first)
    assert astuple(whole) == pytest.approx(astuple(difference(left, right, texts, 5)))
    assert whole.tokens == sum(len(text) - start - 1 for text, start in zip(texts, starts, strict=True))
    cut = [max(0, begin - 1 - start) for begin, start in zip(first, starts, strict=True)]
    ends = tuple(start + at for start, at in zip(starts, cut, strict=True))
    left, right = (
        Trace(ends, tuple(numbers[at:] for numbers, at in zip(one, cut, strict=True)), lambda numbers: numbers)
        for one in hidden
    )
    assert astuple(late) == pytest.approx(astuple(difference(left, right, texts, 5)))
