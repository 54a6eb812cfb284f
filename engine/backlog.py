"""What of a run is still to come, and how many sequences to run at once for it.

Knows lengths that are certain; in which order requests come is decided elsewhere.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from typing import Protocol, runtime_checkable

from .draft.times import RIDGE
from .forecast import is_certain
from .request import Request, Sampling
from .sequence import Sequence
from .tail import LARGEST, limit_pays, sequence_limit, suffix_maxima


@runtime_checkable
class Announced(Protocol):
    """A stream of requests that knows its rest when its end is in sight."""

    def __iter__(self) -> Iterator[Request]: ...

    def rest(self) -> Mapping[Sampling, int] | None:
        """How many requests are still to be handed out, by what they ask for; None while nobody knows."""
        ...


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
        left = _left(running)
        longest = max([*left, self._longest[self._next]])
        return sequence_limit(self._left + sum(left), longest, RIDGE, most)


class AnnouncedBacklog:
    """The rest of a stream, once it is known, if all lengths in it are certain and running fewer at once pays."""

    def __init__(self, stream: Announced) -> None:
        self._stream = stream
        self._pays: bool | None = None  # not decided yet
        self._wait = 0  # requests to take before the rest can be small enough to decide
        self._to_come: tuple[int, int] | None = None  # tokens of the rest and of its longest answer, until one is taken

    def took(self) -> None:
        self._wait -= 1
        self._to_come = None

    def most(self, running: Ordered[Sequence], most: int) -> int:
        if self._pays is None and self._wait <= 0:
            self._look(running, most)
        if not self._pays:
            return most
        if self._to_come is None:
            rest = self._stream.rest()
            assert rest is not None  # known once, known to the end
            self._to_come = _work_and_longest(rest)
        work, longest = self._to_come
        left = _left(running)
        return sequence_limit(work + sum(left), max([*left, longest]), RIDGE, most)

    def _look(self, running: Ordered[Sequence], most: int) -> None:
        """Decides, or finds how many requests have to be taken first; every look takes a time by kinds of request."""
        rest = self._stream.rest()
        if rest is None:
            return
        excess = _answers(rest) - LARGEST
        if excess > 0:
            self._wait = -(-excess // max(sampling.n for sampling in rest))
        else:
            self._pays = _is_certain(rest, running) and limit_pays(_longest_first(rest, _left(running)), most, RIDGE)


def _left(running: Ordered[Sequence]) -> list[int]:
    return [sequence.task.request.sampling.max_tokens - sequence.answer_length for sequence in running]


def _work_and_longest(rest: Mapping[Sampling, int]) -> tuple[int, int]:
    work = sum(count * sampling.n * sampling.max_tokens for sampling, count in rest.items())
    return work, max((sampling.max_tokens for sampling in rest), default=0)


def _answers(rest: Mapping[Sampling, int]) -> int:
    return sum(count * sampling.n for sampling, count in rest.items())


def _is_certain(rest: Mapping[Sampling, int], running: Ordered[Sequence]) -> bool:
    return all(map(is_certain, [*rest, *(sequence.task.request.sampling for sequence in running)]))


def _longest_first(rest: Mapping[Sampling, int], left: list[int]) -> list[int]:
    """Lengths of all answers to come and of what is left of those that run."""
    lengths = [sampling.max_tokens for sampling, count in rest.items() for _ in range(count * sampling.n)]
    return sorted([*lengths, *left], reverse=True)
