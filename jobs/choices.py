"""The settings that a job leaves to `auto`: chosen from its first rows and the rates of the machine, told and recorded.

Knows which keys of the job file they are and how they are put into words; what is best is decided in the engine.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchgen.engine.config import parse_memory
from batchgen.engine.costs import Prediction, Settings, Workload, predict
from batchgen.engine.memory import cache_bytes, free_host_memory
from batchgen.engine.options import Asked, Chosen, choose_settings
from batchgen.engine.processor import Place
from batchgen.engine.profile import workload_of
from batchgen.engine.rates import Rates
from batchgen.engine.request import Request

from .errors import UsageError
from .job import Job
from .models import Models

_FIRST_LOOK = 64  # rows that have ended
_WORTH_A_CHANGE = 1.05
KEPT = "the engine that was loaded for an earlier step keeps to it"
_WEIGHTS = "native", "int8", "int4", "fp8"
_NARROW_KV = "int8", "fp8", "int4"
_SPOKEN = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "max_batch_tokens": "tokens a step",
    "max_sequences": "answers at once",
    "block_size": "tokens a block",
    "sharing": "shared keys read together",
    "speculation": "speculation",
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Situation:
    """What a choice rests on: the job, its work as its first rows tell it, the machine, the number format of
    computation, and the device.
    """

    job: Job
    work: Workload
    rates: Rates
    dtype: str
    place: Place

    @classmethod
    def of(cls, job: Job, models: Models, requests: Sequence[Request], rows: int, measure: bool = True) -> "Situation":
        """`requests`: the first rows that can be asked. Raises ModelError for a device that cannot be used.

        `measure`: the device is asked for, and unknown rates are measured if the job is long enough for it. Else both
        are taken from what is known without loading torch.
        """
        work, place = workload_of(requests, rows), models.place(job) if measure else models.likely_place(job)
        return cls(job, work, models.rates(job, place, work if measure else None), models.dtype(job, place), place)

    def shares(self) -> dict[str, dict[str, float]]:
        """By kind and format: the job's time beside that with native weights and keys in the computation's format."""
        return {kind: self._shares_of(kind) for kind in self._own}

    def _shares_of(self, kind: str) -> dict[str, float]:
        settled, memory = {**self._own, **self._settled}, _memory(self.job, self.place)

        def seconds(name: str) -> float:
            return choose_settings(self.work, self.rates, Asked({**settled, kind: name}, memory)).predicted.seconds

        own = seconds(self._own[kind])
        return {name: seconds(name) / own for name in self._formats[kind]}

    def choose(self, formats: Mapping[str, Any] | None = None) -> Chosen:
        """All settings; `formats` are those that the accuracy gate has settled, None before it was asked."""
        settled = self._settled
        if formats is not None:
            gated = {kind: formats[kind] for kind in self._own if formats[kind] != "auto"}
            settled = {**settled, **self._own, **gated}
        elif self.dtype == "float32":  # the exact mode
            settled = {**self._own, **settled}
        still_open = {kind: names for kind, names in self._formats.items() if kind not in settled}
        return choose_settings(self.work, self.rates, Asked(settled, _memory(self.job, self.place), still_open))

    def predict(self, settings: Settings) -> Prediction:
        """The job under these settings."""
        return predict(
            self.work, settings, self.rates, _memory(self.job, self.place) / self.rates.kv_bytes[settings.kv_cache]
        )

    def require_room(self, settings: Settings) -> None:
        """Raises UsageError when the memory for keys and values holds not even one block."""
        needed = settings.block_size * self.rates.kv_bytes[settings.kv_cache]
        if _memory(self.job, self.place) < needed:
            place = f"{self.job.source}: engine.memory: {self.job.engine.memory}"
            raise UsageError(f"{place} holds no KV block of {needed} bytes; raise it")

    @property
    def _own(self) -> dict[str, Any]:
        return {"weights": "native", "kv_cache": self.dtype}

    @property
    def _formats(self) -> dict[str, list[str]]:
        """Those that have rates, what changes nothing first."""
        return {"weights": list(_WEIGHTS), "kv_cache": [self.dtype, *_NARROW_KV]}

    @property
    def _settled(self) -> dict[str, Any]:
        """What the job names itself."""
        job, engine = self.job, self.job.engine
        named = {
            "weights": job.model.weights,
            "kv_cache": engine.kv_cache,
            "max_batch_tokens": engine.max_batch_tokens,
            "max_sequences": engine.max_sequences,
            "block_size": engine.block_size,
            "speculation": "auto" if engine.speculation == "auto" else engine.speculation != "off",
        }
        settled = {name: value for name, value in named.items() if value != "auto"}
        return settled if engine.prefix_sharing else {**settled, "sharing": False}


def _memory(job: Job, place: Place) -> float:
    """Bytes for keys and values, as far as they are known before the model is loaded; a graphics card's are not."""
    memory = job.engine.memory
    if place.kind == "cuda" and not isinstance(parse_memory(memory), int):
        return math.inf
    return float(cache_bytes(memory, place.kind, free_host_memory()))


def with_choices(job: Job, chosen: Chosen) -> Job:
    """The job with the chosen limits in place of `auto`; speculation that leaves no room is off."""
    settings, engine = chosen.settings, job.engine
    values: Record = {
        "max_batch_tokens": settings.max_batch_tokens,
        "max_sequences": settings.max_sequences,
        "block_size": settings.block_size,
    }
    if engine.speculation == "auto" and not settings.speculation:
        values["speculation"] = "off"
    return job.model_copy(update={"engine": engine.model_copy(update=values)})


def limits_of(resolved: Mapping[str, Any]) -> Record:
    """What of the settings the engine may take otherwise than it was asked to."""
    return {name: resolved[name] for name in ("max_batch_tokens", "max_sequences")}


def as_taken(situation: Situation, chosen: Chosen, resolved: Mapping[str, Any]) -> Chosen:
    """The choices with the limits that the engine came to."""
    limits = limits_of(resolved)
    settings = replace(chosen.settings, **limits)
    if settings == chosen.settings:
        return chosen
    told = [
        choice
        if limits.get(choice.name, choice.value) == choice.value
        else replace(choice, value=limits[choice.name], reason=KEPT)
        for choice in chosen.choices
    ]
    return Chosen(settings, tuple(told), situation.predict(settings))


@dataclass
class Adaptation:
    """What finished rows say of the length of answers, and settings that suit them better, if there are such."""

    situation: Situation
    chosen: Chosen
    formats: Mapping[str, Any]
    rows: int  # of the run
    done: int = 0
    tokens: int = 0
    next_look: int = field(init=False)
    now: Situation = field(init=False)  # with answers as long as those that have ended, and the rows still to come

    def __post_init__(self) -> None:
        self.now = self.situation
        self.next_look = max(_FIRST_LOOK, 2 * self.chosen.settings.max_sequences // self.situation.work.samples)

    def finished(self, rows: int, answer_tokens: int) -> Chosen | None:
        """Rows that ended. Now and then, at twice as many each time, what to ask the engine for; `took` comes then.

        Short answers end first, so nothing is concluded before twice as many have ended as run at once.
        """
        self.done, self.tokens = self.done + rows, self.tokens + answer_tokens
        if self.done < self.next_look or self.done >= self.rows:
            return None
        self.next_look = 2 * self.done
        work = self.situation.work
        answer = max(1.0, self.tokens / self.done / work.samples)
        self.now = replace(self.situation, work=replace(work, answer=answer, rows=self.rows - self.done))
        other = limits_of(asdict(self.now.choose(self.formats).settings))
        settings = replace(self.chosen.settings, **other)
        return replace(self.chosen, settings=settings) if self._gain(settings) >= _WORTH_A_CHANGE else None

    def loses(self, limits: Mapping[str, Any]) -> bool:
        """The rest of the job would take longer under these limits of the engine."""
        return self._gain(replace(self.chosen.settings, **limits)) < 1

    def took(self, limits: Mapping[str, Any]) -> Record | None:
        """What to tell of the limits that the engine has now, maybe less than asked for; None if none changed."""
        settings = replace(self.chosen.settings, **limits)
        if settings == self.chosen.settings:
            return None
        gain, self.chosen = self._gain(settings), replace(self.chosen, settings=settings)
        return {"rows": self.done, "answer": round(self.now.work.answer, 1), **limits, "gain": round(gain, 3)}

    def _gain(self, settings: Settings) -> float:
        return self.now.predict(self.chosen.settings).seconds / self.now.predict(settings).seconds


def record(situation: Situation, chosen: Chosen) -> Record:
    """What the manifest keeps."""
    predicted = chosen.predicted
    return {
        "basis": f"{situation.rates.basis} rates",
        **chosen.to_record(),
        "predicted": {
            "seconds": round(predicted.seconds, 3),
            "step_ms": round(1000 * predicted.step_seconds, 3),
            "step_tokens": round(predicted.step_tokens, 1),
        },
    }


def measured(seconds: float, steps: int, tokens: int) -> Record:
    """The same figures of a run that is over; `seconds` of its steps."""
    if not steps:
        return {}
    return {
        "seconds": round(seconds, 3),
        "step_ms": round(1000 * seconds / steps, 3),
        "step_tokens": round(tokens / steps, 1),
    }


def last_run(choices: Mapping[str, Any]) -> Record:
    """What a manifest's choices say of the run that took them: predicted and measured. Nothing before one is over."""
    return {name: choices[name] for name in ("predicted", "measured")} if choices.get("measured") else {}


def explain_choices(situation: Situation, chosen: Chosen, last: Mapping[str, Any]) -> Iterator[str]:
    """A table: each setting, what it was chosen among, with the seconds of the job under each, and why.

    `last`: what was predicted for the job's last run, and measured in it.
    """
    work, predicted = situation.work, chosen.predicted
    yield (
        f"a row has {work.common:.0f} prompt tokens in common with others and {work.own:.0f} of its own, and "
        f"{work.answer:.0f} answer tokens are expected" + (f" for each of {work.samples} samples" * (work.samples > 1))
    )
    yield f"predicted with {situation.rates.basis} rates: {in_words(predicted)}"
    for name, figures in last.items():
        steps = f"steps of {figures['step_ms']:.1f} ms and {figures['step_tokens']:.0f} tokens"
        yield f"the last run, {name}: {figures['seconds']:.1f} s, {steps}"
    for choice in chosen.choices:
        yield f"  {_SPOKEN[choice.name]}: {_shown(choice.name, choice.value)} ({choice.reason})"
        for value, found in choice.alternatives:
            if len(choice.alternatives) > 1:
                mark = "*" if value == choice.value else " "
                yield f"    {mark} {_shown(choice.name, value):>9}  {in_words(found)}"


def in_words(predicted: Any) -> str:
    return (
        f"{predicted.seconds:.1f} s, steps of {1000 * predicted.step_seconds:.1f} ms and "
        f"{predicted.step_tokens:.0f} tokens, first row after {predicted.first_row_seconds:.1f} s"
    )


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
