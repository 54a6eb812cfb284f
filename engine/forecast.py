"""How much longer answers will get, from those that have ended or run: what admission reserves KV blocks by.

Knows lengths and groups only. Answers are compared by the share of their max_tokens that they used.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .request import Sampling

PRIOR_SHARE = 0.5  # of max_tokens, until enough answers have ended
ENOUGH = 32
REMEMBERED = 1024
BINS = 64
MAX_GROUPS = 256

Floats = NDArray[np.float64]
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


Running = tuple[float, Group]  # the share of its max_tokens that an answer has so far


class Shares:
    """Shares of max_tokens that answers use, and mean and variance of those beyond a length.

    Short answers end first, so those that run count for what they have (the estimate of Kaplan and Meier, 1958), until
    more have ended than are remembered: from then on answers of all lengths end as often as they come.
    """

    def __init__(self) -> None:
        self._ended: deque[float] = deque(maxlen=REMEMBERED)
        self._table: list[tuple[float, float] | None] = [None] * BINS  # mean, variance of shares beyond a bin's end
        self._news = 0

    def observe(self, share: float, running: Callable[[], Iterable[float]]) -> None:
        """Takes note of an ended answer; `running` has the shares of those that go on."""
        self._ended.append(share)
        self._news += 1
        if self._news >= ENOUGH:
            self._refresh(np.array([] if len(self._ended) == REMEMBERED else list(running())))

    def beyond(self, length: int, limit: int) -> tuple[float, float] | None:
        """Mean and variance of the shares of answers longer than `length` of `limit`; None when too few are known."""
        return self._table[min(BINS - 1, length * BINS // limit)]

    def _refresh(self, running: Floats) -> None:
        """Every few answers, so that asking costs a look-up."""
        self._news = 0
        ended = np.sort(np.array(self._ended))
        shares, weights = lifetimes(ended, np.sort(running))
        for index, first in enumerate(np.searchsorted(ended, np.arange(BINS) / BINS, side="right").tolist()):
            self._table[index] = None
            if len(ended) - first >= ENOUGH:
                mean = np.average(shares[first:], weights=weights[first:])
                variance = np.average((shares[first:] - mean) ** 2, weights=weights[first:])
                self._table[index] = float(mean), float(variance)


def lifetimes(ended: Floats, running: Floats) -> tuple[Floats, Floats]:
    """Shares that answers use and how likely each is, from ended ones and from what running ones have, both sorted.

    Last stands what outlives them all: nothing is known of it but that it ends before 1.
    """
    at_least = np.arange(len(ended), 0, -1) + len(running) - np.searchsorted(running, ended)  # so many got as far
    surviving = np.concatenate([[1.0], np.cumprod(1 - 1 / at_least)])
    longest = max(ended[-1], running[-1]) if len(running) else ended[-1]
    return np.append(ended, (longest + 1) / 2), np.append(surviving[:-1] / at_least, surviving[-1])


class LengthForecast:
    """Mean and variance of the tokens an answer still needs, given how many it has and how its prompt starts.

    Answers to prompts with one start are a group; what too few of a group have told is taken from all answers.
    `running` lists the answers that go on.
    """

    def __init__(self, running: Callable[[], Iterable[Running]] = tuple) -> None:
        self._running = running
        self._all = Shares()
        self._groups: OrderedDict[Group, Shares] = OrderedDict()

    def observe(self, length: int, sampling: Sampling, group: Group = ()) -> None:
        """Takes note of an ended answer of `length` tokens."""
        share = length / sampling.max_tokens
        self._all.observe(share, lambda: (has for has, _ in self._running()))
        own = self._groups.setdefault(group, Shares())
        own.observe(share, lambda: (has for has, other in self._running() if other == group))
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
