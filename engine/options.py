"""The settings of a job: every value that is worth a look under the cost model, and the one that is taken.

Knows which values there are and what is preferred among equals; how long a job takes under them is in costs.py. None
of them changes what an answer is meant to be; number formats are settled by the accuracy gate, the others here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .costs import Prediction, Settings, Workload, predict
from .rates import Rates

STEP_TOKENS = 128, 256, 512, 1024, 2048, 4096, 8192
SEQUENCES = 32, 64, 128, 256, 512, 1024
BLOCK_SIZES = 16, 32, 64
NEAR_STEP, NEAR_SEQUENCES, NEAR = 1.01, 1.01, 1.005  # times the best; among those within it the smallest is taken
WAIT = 0.1  # of a second of the job: what a second until its first row counts as, in the size of a step
DEFAULT = Settings("native", "bfloat16", 16, 512, 256, sharing=True, speculation=True)
SHORT = 2  # tokens of answers that leave a draft no room


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting: what was taken among which values, with what the job is predicted to take under each."""

    name: str
    value: Any
    reason: str
    alternatives: tuple[tuple[Any, Prediction], ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Plain values for a manifest."""
        return {
            "name": self.name,
            "value": self.value,
            "reason": self.reason,
            "alternatives": [
                {
                    "value": value,
                    "seconds": round(found.seconds, 3),
                    "step_ms": round(1000 * found.step_seconds, 3),
                    "step_tokens": round(found.step_tokens, 1),
                    "first_row_seconds": round(found.first_row_seconds, 3),
                    "kv_tokens": round(found.kv_tokens),
                }
                for value, found in self.alternatives
            ],
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """What is settled before: values by name of setting. What is missing is chosen. `memory`: bytes for keys."""

    settled: Mapping[str, Any] = field(default_factory=dict)
    memory: float = float("inf")
    formats: Mapping[str, Sequence[str]] = field(default_factory=dict)  # that may be chosen, by setting


@dataclass(frozen=True, slots=True)
class Chosen:
    """All settings of a job, why, and what is expected of them."""

    settings: Settings
    choices: tuple[Choice, ...]
    predicted: Prediction

    def to_record(self) -> dict[str, Any]:
        return {"settings": asdict(self.settings), "choices": [choice.to_record() for choice in self.choices]}


def choose_settings(work: Workload, rates: Rates, asked: Asked) -> Chosen:
    """One setting after another, each with those before it as taken."""
    search = _Search(work, rates, asked)
    settings = replace(DEFAULT, **{"speculation": False, **asked.settled})  # sizes must not rest on lucky drafts
    choices = []
    for find in (_weights, _kv_cache, _max_batch_tokens, _max_sequences, _block_size, _sharing, _speculation):
        choice = find(search, settings)
        settings = replace(settings, **{choice.name: choice.value})
        choices.append(choice)
    return Chosen(settings, tuple(choices), search.predict(settings))


@dataclass(frozen=True, slots=True)
class _Search:
    work: Workload
    rates: Rates
    asked: Asked

    def predict(self, settings: Settings) -> Prediction:
        return predict(self.work, settings, self.rates, self.asked.memory / self.rates.kv_bytes[settings.kv_cache])

    def among(
        self,
        name: str,
        values: Iterable[Any],
        under: Callable[[Any], Settings],
        near: float,
        reason: str,
        wait: float = 0.0,
    ) -> Choice:
        """The first of the values that costs at most `near` times the least; a settled one as is.

        What it costs is the job's seconds and `wait` times those until its first row.
        """
        if name in self.asked.settled:
            value = self.asked.settled[name]
            return Choice(name, value, "as the job says", ((value, self.predict(under(value))),))
        found = tuple((value, self.predict(under(value))) for value in values)
        costs = [prediction.seconds + wait * prediction.first_row_seconds for _, prediction in found]
        value = next(value for (value, _), cost in zip(found, costs, strict=True) if cost <= near * min(costs))
        return Choice(name, value, reason, found)


def _weights(search: _Search, settings: Settings) -> Choice:
    names = search.asked.formats.get("weights", (settings.weights,))
    return search.among(
        "weights", names, lambda name: replace(settings, weights=name), NEAR, "the fastest; the accuracy gate decides"
    )


def _kv_cache(search: _Search, settings: Settings) -> Choice:
    names = search.asked.formats.get("kv_cache", (settings.kv_cache,))
    return search.among(
        "kv_cache", names, lambda name: replace(settings, kv_cache=name), 1 / 0.97, "worth 3 %; the gate decides"
    )


def _max_batch_tokens(search: _Search, settings: Settings) -> Choice:
    """With the best number of sequences for each, so that the size of the step alone is compared."""

    def under(tokens: int) -> Settings:
        sized = replace(settings, max_batch_tokens=tokens)
        if "max_sequences" in search.asked.settled:
            return sized
        return min(
            (replace(sized, max_sequences=most) for most in SEQUENCES), key=lambda one: search.predict(one).seconds
        )

    reason = "the smallest step within 1 % of the best, where a second until the first row is worth a tenth of another"
    return search.among("max_batch_tokens", STEP_TOKENS, under, NEAR_STEP, reason, WAIT)


def _max_sequences(search: _Search, settings: Settings) -> Choice:
    reason = "the fewest at once within 1 % of the fastest"
    return search.among(
        "max_sequences", SEQUENCES, lambda most: replace(settings, max_sequences=most), NEAR_SEQUENCES, reason
    )


def _block_size(search: _Search, settings: Settings) -> Choice:
    reason = "the smallest: half a block is lost per answer"
    return search.among("block_size", BLOCK_SIZES, lambda size: replace(settings, block_size=size), NEAR, reason)


def _sharing(search: _Search, settings: Settings) -> Choice:
    work, sharing = search.work, search.rates.sharing[settings.kv_cache]
    if not sharing.pays(work.rows, work.common) and not sharing.pays(work.samples, work.own):
        return Choice("sharing", False, f"rows have {work.common:.0f} tokens in common: too few to read them once")
    what = "samples read their prompt" if work.samples > 1 else f"rows read the {work.common:.0f} tokens they share"
    return search.among(
        "sharing",
        (True, False),
        lambda on: replace(settings, sharing=on),
        NEAR,
        f"{what} together",
    )


def _speculation(search: _Search, settings: Settings) -> Choice:
    work = search.work
    if "speculation" not in search.asked.settled and (work.scored or work.answer <= SHORT):
        return Choice("speculation", False, f"answers of {work.answer:.0f} tokens leave drafts no room")
    reason = "drafts where few answers run, as far as measured steps say they pay"
    return search.among("speculation", (True, False), lambda on: replace(settings, speculation=on), NEAR, reason)
