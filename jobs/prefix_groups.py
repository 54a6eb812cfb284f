"""Which rows of a run had a prefix in common, and what that saved: counted while the rows go to the engine.

Knows prompts in the order they come, which is the planned one; keeps a stack and the largest groups.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.plan import common_prefix
from batchgen.engine.request import Completion, Request
from batchgen.pipeline.flow import Asked, Generator

MOST = 8
_SHORTEST = 16  # tokens; a shorter common start is not worth telling
_KEPT = 64  # tokens at either end of a prefix, for an excerpt


@dataclass(frozen=True, order=True)
class Group:
    """`rows` prompts that begin with the same `length` tokens; `saved` of their tokens need no computing for that."""

    saved: int
    rows: int
    length: int
    start: tuple[int, ...] = field(compare=False)
    end: tuple[int, ...] = field(compare=False)


class PrefixGroups:
    """The groups that save most among the prompts seen so far, if neighbours are as the plan has them."""

    def __init__(self) -> None:
        self.largest: list[Group] = []
        self._open: list[tuple[int, int]] = [(0, 0)]  # length of a common prefix, and the first row that has it
        self._before: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._rows = 0

    def add(self, prompt: Sequence[int]) -> None:
        """The next prompt."""
        tokens = np.asarray(prompt, np.uint32)
        self._end_longer_than(common_prefix(self._before, tokens))
        self._before = tokens
        self._rows += 1

    def close(self) -> None:
        """No prompt comes any more."""
        self._end_longer_than(0)

    def watch(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests as they are; those without an error are counted on their way."""
        for request in requests:
            if request.error is None:
                self.add(request.prompt)
            yield request
        self.close()

    def _end_longer_than(self, common: int) -> None:
        """Ends the groups that the next row is not in; it shares `common` tokens with the row before it."""
        first = self._rows - 1
        while self._open[-1][0] > common:
            length, first = self._open.pop()
            above = max(common, self._open[-1][0])
            if length >= _SHORTEST:
                self._keep(length, above, self._rows - first)
        if self._open[-1][0] < common:
            self._open.append((common, first))

    def _keep(self, length: int, above: int, rows: int) -> None:
        prefix = self._before[:length]
        ends = tuple(prefix[:_KEPT].tolist()), tuple(prefix[_KEPT:][-_KEPT:].tolist())
        self.largest = heapq.nlargest(MOST, [*self.largest, Group((length - above) * (rows - 1), rows, length, *ends)])


@dataclass(frozen=True)
class Watched:
    """A generator of answers whose requests are counted on their way in."""

    generator: Generator
    groups: PrefixGroups

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        watched = self.groups.watch(requests)
        return self.generator.run(Asked(watched, requests.rest) if isinstance(requests, Asked) else watched)

    def interrupt(self) -> None:
        self.generator.interrupt()


class Decoder(Protocol):
    """The part of a tokenizer that excerpts need."""

    def decode(self, tokens: Sequence[int]) -> str: ...


def describe(groups: Iterable[Group], tokenizer: Decoder) -> list[dict[str, Any]]:
    """The groups as a manifest keeps them, the start and the end of their text in words."""
    return [
        {
            "rows": group.rows,
            "prefix_tokens": group.length,
            "saved_tokens": group.saved,
            "excerpt": " ... ".join(tokenizer.decode(part) for part in (group.start, group.end) if part),
        }
        for group in groups
    ]


def merged(earlier: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest groups of all runs of a job; what runs of their own shared stands as groups of its own."""
    return sorted([*earlier, *found], key=lambda group: -group["saved_tokens"])[:MOST]
