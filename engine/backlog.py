"""What of a run is still to come, and how many sequences to run at once for it.

Knows lengths that are certain; in which order requests come is decided elsewhere.
"""

from collections.abc import Sequence as Ordered
from typing import Protocol

from .draft.times import RIDGE
from .request import Sampling
from .sequence import Sequence
from .tail import sequence_limit, suffix_maxima


class Backlog(Protocol):
    """What is still to come of a run."""

    def took(self) -> None:
        """The next request was taken."""
        ...

    def most(self, running: Ordered[Sequence], most: int) -> int:
        """How many sequences to run at once, of `most` there is room for."""
        ...


class UnknownBacklog:
    """Nobody knows how much is to come, or it does not matter: all there is room for."""

    def took(self) -> None:
        return None

    def most(self, running: Ordered[Sequence], most: int) -> int:
        return most


UNKNOWN_BACKLOG = UnknownBacklog()


class KnownBacklog:
    """Requests, in their order, whose answers will have max_tokens."""

    def __init__(self, samplings: Ordered[Sampling]) -> None:
        self._work = [sampling.n * sampling.max_tokens for sampling in samplings]
        self._left = sum(self._work)
        self._longest = suffix_maxima([sampling.max_tokens for sampling in samplings])
        self._next = 0

    def took(self) -> None:
        if self._next < len(self._work):
            self._left -= self._work[self._next]
            self._next += 1

    def most(self, running: Ordered[Sequence], most: int) -> int:
        left = [sequence.task.request.sampling.max_tokens - sequence.answer_length for sequence in running]
        longest = max([*left, self._longest[self._next]])
        return sequence_limit(self._left + sum(left), longest, RIDGE, most)
