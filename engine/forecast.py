"""How much longer answers will get, from those that have ended: what admission reserves KV blocks by.

Knows lengths only. Answers are compared by the share of their max_tokens that they used.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from .request import Sampling

PRIOR_SHARE = 0.5  # of max_tokens, until enough answers have ended
ENOUGH = 32
REMEMBERED = 1024
BINS = 64


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


class LengthForecast:
    """Mean and variance of the tokens an answer still needs, given how many it has."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=REMEMBERED)
        self._table: list[tuple[float, float] | None] = [None] * BINS  # mean, variance of shares beyond a bin's end
        self._news = 0

    def observe(self, length: int, sampling: Sampling) -> None:
        """Takes note of an ended answer of `length` tokens."""
        self._shares.append(length / sampling.max_tokens)
        self._news += 1
        if self._news >= ENOUGH:
            self._refresh()

    def remaining(self, length: int, sampling: Sampling) -> Demand:
        """Further tokens of an answer that has `length`."""
        limit = sampling.max_tokens
        if sampling.min_tokens == limit or (sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids):
            return Demand(limit - length)
        known = self._table[min(BINS - 1, length * BINS // limit)]
        if known is None:
            return Demand(max(limit * PRIOR_SHARE - length, (limit - length) / 2))
        mean, variance = known
        return Demand(max(mean * limit - length, 1.0), variance * limit**2)

    def _refresh(self) -> None:
        """Every few answers, so that asking costs a look-up."""
        self._news = 0
        shares = np.array(self._shares)
        for index in range(BINS):
            longer = shares[shares > index / BINS]
            self._table[index] = (float(longer.mean()), float(longer.var())) if len(longer) >= ENOUGH else None
