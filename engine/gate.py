"""Which number formats a job computes in: the fastest that change its answers little enough, measured on its own rows.

Knows the order of trials and the limits; how differences are measured is in `accuracy.py`. A format that is asked for
by name is taken whatever it costs, and its numbers are kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from ..kernels import Kernels
from .accuracy import Accuracy, Candidate, Trace, differences, trace
from .decoder import Decoder
from .spec import ModelError

NATIVE = "native"
REFERENCE = "reference"  # the native weights, in the dtype of least rounding
KV_TOKENS = 768  # that KV formats are measured on: without other rounding beside it theirs shows sooner


@dataclass(frozen=True, slots=True)
class Limits:
    """What a format may change: rise of the perplexity, mean divergence in nat, share of answer tokens.

    The share is one of few and rare events: of formats that change as much as they may, half would be refused by
    chance. It is broken when it is above the limit by more than its standard error, and at twice the limit at latest,
    which one changed token of a few is above.
    """

    rise: float
    divergence: float
    changed: float

    def broken(self, measured: "Measured") -> str | None:
        """The first limit that is broken, in words."""
        if not measured.all.perplexity_rise <= self.rise:
            return f"perplexity {measured.all.perplexity_rise:+.2%}, limit {self.rise:+.1%}"
        if not measured.all.divergence <= self.divergence:
            return f"KL {measured.all.divergence:.4f}, limit {self.divergence}"
        error = min(self.changed, (self.changed * (1 - self.changed) / measured.answers.tokens) ** 0.5)
        if not 1 - measured.answers.agreement <= self.changed + error:
            agreement, tokens = measured.answers.agreement, measured.answers.tokens
            return f"same choice {agreement:.2%}, limit {1 - self.changed:.0%} - {error:.1%} for {tokens} tokens"
        return None


WEIGHTS = Limits(rise=0.01, divergence=0.01, changed=0.02)
KV = Limits(rise=0.005, divergence=0.01, changed=0.02)


@dataclass(frozen=True, slots=True)
class Measured:
    """Differences over every token of the texts, and over their answers alone."""

    all: Accuracy
    answers: Accuracy


@dataclass(frozen=True, slots=True)
class Texts:
    """What is measured on: prompts with the greedy answers of the unquantised model, and where the answers begin."""

    tokens: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    vocabulary: int

    def beginning(self, reference: Trace, tokens: int) -> "tuple[Texts, Trace]":
        """The first texts, and what `reference` made of them, up to about so many tokens computed; one at least."""
        ends = accumulate(len(hidden) for hidden in reference.hidden)
        count = max(1, sum(end <= tokens for end in ends))
        texts = replace(self, tokens=self.tokens[:count], first=self.first[:count])
        return texts, replace(reference, starts=reference.starts[:count], hidden=reference.hidden[:count])

    def compare(self, reference: Trace, candidate: Trace) -> Measured:
        return Measured(*differences(reference, candidate, self.tokens, self.vocabulary, self.first))


@dataclass(frozen=True, slots=True)
class Choice:
    """The formats of a job, and a record of every trial: plain values that a manifest can hold."""

    weights: str
    kv_cache: str
    trials: tuple[dict[str, Any], ...] = ()
    note: str | None = None  # what was not measured, where it should have been, and why


Load = Callable[[str], Decoder]
Answer = Callable[[Decoder], Texts | None]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: the values of the job, and formats worth a trial, the fastest first, with their share of the time.

    A value that is not auto is the only format of its kind, and taken.
    """

    weights: str
    kv_cache: str
    weight_trials: Mapping[str, float]
    kv_trials: Mapping[str, float]


def choose(question: Question, load: Load, answer: Answer, kernels: Kernels) -> Choice:
    """Tries formats one after the other; every model is let go before the next is loaded.

    `load`: for REFERENCE what all formats are compared with, else the model that the job would compute with.
    `answer`: texts of the native model, which are what all of them are compared on; None where it has none.
    KV formats are tried on the reference, so that theirs is the only rounding that is seen.
    """
    if not (question.weight_trials or question.kv_trials):
        return Choice(_unless_auto(question.weights, NATIVE), question.kv_cache)
    texts = answer(load(NATIVE))
    if texts is None:
        note = "not measured: none of the first rows has an answer to measure on"
        return Choice(_unless_auto(question.weights, NATIVE), question.kv_cache, note=note)
    model = load(REFERENCE)
    seen = _trace(model, texts, kernels, "auto")
    trials: list[dict[str, Any]] = []
    kv_cache = _try_kv(question, model, *texts.beginning(seen, KV_TOKENS), kernels, trials)
    del model
    skipped: list[str] = []
    weights = _try_weights(question, _skipping(question, load, skipped), texts, seen, kernels, trials)
    return Choice(weights, kv_cache, tuple(trials), note="; ".join(skipped) or None)


def _skipping(question: Question, load: Load, skipped: list[str]) -> Callable[[str], Decoder | None]:
    """`load` that gives None for a format which cannot hold the checkpoint, unless it is asked for, and says why."""

    def loaded(name: str) -> Decoder | None:
        try:
            return load(name)
        except ModelError as error:
            if question.weights == name:
                raise
            skipped.append(f"{name} not tried: {error}")
            return None

    return loaded


def _try_weights(
    question: Question,
    load: Callable[[str], Decoder | None],
    texts: Texts,
    reference: Trace,
    kernels: Kernels,
    trials: list[dict[str, Any]],
) -> str:
    for name, share in question.weight_trials.items():
        model = load(name)
        if model is None:
            continue
        measured = texts.compare(reference, _trace(model, texts, kernels, "auto"))
        trials.append(_record("weights", name, share, measured, WEIGHTS, question.weights == name, texts))
        if trials[-1]["taken"]:
            return name
        del model
    return NATIVE


def _try_kv(
    question: Question, model: Decoder, texts: Texts, reference: Trace, kernels: Kernels, trials: list[dict[str, Any]]
) -> str:
    for name, share in question.kv_trials.items():
        measured = texts.compare(reference, _trace(model, texts, kernels, name))
        trials.append(_record("kv_cache", name, share, measured, KV, question.kv_cache == name, texts))
        if trials[-1]["taken"]:
            return name
    return question.kv_cache


def _trace(model: Decoder, texts: Texts, kernels: Kernels, kv_cache: str) -> Trace:
    found = trace(Candidate(model, kernels, model.kv_shape(kv_cache)), texts.tokens)
    return replace(found, logits=model.head().logits)


def _record(
    kind: str, name: str, share: float, measured: Measured, limits: Limits, asked: bool, texts: Texts
) -> dict[str, Any]:
    broken = limits.broken(measured)
    figures = {
        "perplexity_rise": round(measured.all.perplexity_rise, 6),
        "divergence": round(measured.all.divergence, 6),
        "same_choice": round(measured.answers.agreement, 6),
        "tokens": measured.all.tokens,
        "answer_tokens": measured.answers.tokens,
        "rows": len(texts.tokens),
    }
    taken = asked or broken is None
    return {"kind": kind, "format": name, "time": round(share, 3), **figures, "asked": asked, "taken": taken} | {
        "broken": broken,
        "limits": asdict(limits),
    }


def _unless_auto(value: str, otherwise: str) -> str:
    return otherwise if value == "auto" else value
