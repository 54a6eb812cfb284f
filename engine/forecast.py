"""How much longer answers will get, from those that have ended: what admission reserves KV blocks by.

Knows lengths and groups only. Answers are compared by the share of their max_tokens that they used.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from .request import Sampling

PRIOR_SHARE = 0.5  # of max_tokens, until enough answers have ended
ENOUGH = 32
REMEMBERED = 1024
BINS = 64
MAX_GROUPS = 256

Group = tuple[int, ...]  # the first tokens of a prompt


@dataclass(frozen=True, slots=True)
class Demand:
    """How much more a set of answers is expected to need (tokens, or blocks), and the variance of that number."""

    expected: float = 0.0
    variance: float = 0.0

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(self.expected + other.expected, self.variance + other.variance)

    @property
    def reserve(self) -> float:
        """What to keep free: the expected sum and two standard deviations of it."""
        return self.expected + 2 * math.sqrt(self.variance)


class Shares:
    """Shares of max_tokens that ended answers used, and mean and variance of those beyond a length."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=REMEMBERED)
        self._table: list[tuple[float, float] | None] = [None] * BINS  # mean, variance of shares beyond a bin's end
        self._news = 0

    def observe(self, share: float) -> None:
        self._shares.append(share)
        self._news += 1
        if self._news >= ENOUGH:
            self._refresh()

    def beyond(self, length: int, limit: int) -> tuple[float, float] | None:
        """Mean and variance of the shares of answers longer than `length` of `limit`; None when too few are known."""
        return self._table[min(BINS - 1, length * BINS // limit)]

    def _refresh(self) -> None:
        """Every few answers, so that asking costs a look-up."""
        self._news = 0
        shares = np.array(self._shares)
        for index in range(BINS):
            longer = shares[shares > index / BINS]
            self._table[index] = (float(longer.mean()), float(longer.var())) if len(longer) >= ENOUGH else None


class LengthForecast:
    """Mean and variance of the tokens an answer still needs, given how many it has and how its prompt starts.

    Answers to prompts with one start are a group; what too few of a group have told is taken from all answers.
    """

    def __init__(self) -> None:
        self._all = Shares()
        self._groups: OrderedDict[Group, Shares] = OrderedDict()

    def observe(self, length: int, sampling: Sampling, group: Group = ()) -> None:
        """Takes note of an ended answer of `length` tokens."""
        share = length / sampling.max_tokens
        self._all.observe(share)
        self._groups.setdefault(group, Shares()).observe(share)
        self._groups.move_to_end(group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def remaining(self, length: int, sampling: Sampling, group: Group = ()) -> Demand:
        """Further tokens of an answer that has `length`."""
        limit = sampling.max_tokens
        if is_certain(sampling):
            return Demand(limit - length)
        own = self._groups.get(group)
        known = (own and own.beyond(length, limit)) or self._all.beyond(length, limit)
        if known is None:
            return Demand(max(limit * PRIOR_SHARE - length, (limit - length) / 2))
        mean, variance = known
        return Demand(max(mean * limit - length, 1.0), variance * limit**2)


def is_certain(sampling: Sampling) -> bool:
    """Whether an answer has exactly max_tokens: nothing can end it before."""
    free = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
    return sampling.grammar is None and (free or sampling.min_tokens == sampling.max_tokens)
