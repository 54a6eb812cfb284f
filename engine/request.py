"""What goes into the engine and what comes out of it: requests, sampling parameters, completions.

Knows token ids and plain numbers only; no text, no tensors, no files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .grammar import Grammar

FinishReason = Literal["stop", "length", "error"]

MAX_SEED = MAX_KEY = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are chosen. Neutral values leave the model's distribution as it is.

    Raises ValueError, with the name of the field first, when a value is outside its range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # top-k to return beside each token's own; 0 returns the own one only
    grammar: Grammar | None = None  # what the answer must match
    choice_probs: bool = False  # score every choice of the grammar; the answer is the most probable one

    def __post_init__(self) -> None:
        for name, least, most in _INTEGER_RANGES:
            _check_integer(name, getattr(self, name), least, most)
        for name, low, high in _NUMBER_RANGES:
            _check_number(name, getattr(self, name), low, high)
        for name in POSITIVE:
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: must be greater than 0, got 0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, *_LOGPROBS)
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: must be a list, got {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a list would not be hashable
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop: must hold non-empty strings, got {list(self.stop)!r}")
        if not isinstance(self.grammar, Grammar | None):
            raise ValueError(f"grammar: must be a Grammar, got {self.grammar!r:.100}")
        if self.choice_probs:
            self._check_choice_probs()
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_choice_probs(self) -> None:
        if self.grammar is None or self.grammar.kind != "choices":
            raise ValueError("choice_probs: needs choices")
        if not self.greedy:
            raise ValueError("choice_probs: needs temperature 0, the answer is the most probable choice")
        for name in _NOT_WITH_CHOICE_PROBS:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"choice_probs: cannot stand beside {name}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


_NOT_WITH_CHOICE_PROBS = (
    *("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "include_stop", "ignore_eos", "logprobs"),
)
_INTEGER_RANGES: tuple[tuple[str, int, int], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("top_k", 0, 2**31 - 1),
    ("n", 1, 1024),
    ("seed", 0, MAX_SEED),
)
_NUMBER_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
)
POSITIVE = "repetition_penalty", "top_p"  # 0 is not legal
_LOGPROBS = 0, 1000

RANGES: dict[str, tuple[float, float]] = {
    **{name: (low, high) for name, low, high in (*_INTEGER_RANGES, *_NUMBER_RANGES)},
    "logprobs": _LOGPROBS,
}


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}: must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: must be between {low} and {high}, got {value}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name}: must be a number, got {value!r}")
    if math.isnan(value) or not low <= value <= high:
        raise ValueError(f"{name}: must be between {low:g} and {high:g}, got {value}")


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no answer. `code` and `stage` are those of the output's `error` column."""

    code: str
    stage: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; completion tokens are summed over its samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (nat) of a generated token under the raw model, and the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: its tokens (an end token that stopped it included) and why it ended."""

    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids. `key` is the row's position: it comes back on the completion and keys the noise.

    `tag` is carried to the completion untouched. A request with an `error` is not generated, only passed through.
    Raises ValueError for a key outside 0 .. 2**63 - 1.
    """

    key: int
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    tag: Any = None
    error: RowError | None = None

    def __post_init__(self) -> None:
        _check_integer("key", self.key, 0, MAX_KEY)


@dataclass(frozen=True, slots=True)
class Completion:
    """The outcome of one request: `samples` holds sampling.n answers, or none when `error` is set."""

    key: int
    samples: tuple[Sample, ...]
    usage: Usage = field(default_factory=Usage)
    error: RowError | None = None
    tag: Any = None
    choice_probs: tuple[float, ...] | None = None  # of every choice, in their order, when asked for
    attempts: int = 1  # times the row was asked

    @property
    def tokens(self) -> Any:
        """list[int]; list[list[int]] when n > 1; None without an answer."""
        return self._per_sample([sample.tokens for sample in self.samples])

    @property
    def finish_reason(self) -> Any:
        """str; list[str] when n > 1; "error" without an answer."""
        return self._per_sample([sample.finish_reason for sample in self.samples]) or "error"

    @property
    def logprobs(self) -> Any:
        """list[TokenLogprob]; a list of lists when n > 1; None when not asked for."""
        return self._per_sample([sample.logprobs for sample in self.samples])

    @staticmethod
    def _per_sample(values: list[Any]) -> Any:
        return values if len(values) > 1 else (values[0] if values else None)
