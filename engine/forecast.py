"""How much longer answers will get, from those that have ended: what admission reserves KV blocks by.

Knows lengths only. Answers are compared by the share of their max_tokens that they used.
"""

import math
from bisect import bisect_right, insort
from collections import deque

from .request import Sampling

PRIOR_SHARE = 0.5  # of max_tokens, until enough answers have ended
ENOUGH = 32
REMEMBERED = 1024


class LengthForecast:
    """Mean and variance of the tokens an answer still needs, given how many it has."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, length: int, sampling: Sampling) -> None:
        """Takes note of an ended answer of `length` tokens."""
        share = length / sampling.max_tokens
        self._recent.append(share)
        insort(self._sorted, share)
        if len(self._recent) > REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def remaining(self, length: int, sampling: Sampling) -> tuple[float, float]:
        """Expected further tokens of an answer that has `length`, and the variance of that number."""
        limit = sampling.max_tokens
        if sampling.min_tokens == limit or (sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids):
            return float(limit - length), 0.0
        longer = self._sorted[bisect_right(self._sorted, length / limit) :]
        if len(longer) < ENOUGH:
            return max(limit * PRIOR_SHARE - length, (limit - length) / 2), 0.0
        sample = longer[:: max(1, len(longer) // ENOUGH)]
        mean = sum(sample) / len(sample)
        variance = sum((share - mean) ** 2 for share in sample) / len(sample)
        return mean * limit - length, variance * limit**2


def reserve(expected: float, variance: float) -> float:
    """Tokens to keep free for a set of answers: their expected sum and two standard deviations of it."""
    return expected + 2 * math.sqrt(variance)
