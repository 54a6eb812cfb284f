"""What sharing is worth: lengths, distinct prefix tokens and the largest groups of prompts with a common prefix.

Knows prompts in planned order, part by part; memory does not grow with the number of parts.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchgen.pipeline.runs import Part

_BINS = 24  # lengths 1, 2-3, 4-7, ... in powers of two
_SHORTEST_PREFIX = 8  # tokens; below it a common start is chance
_GROUPS = 5


@dataclass(frozen=True, order=True)
class PrefixGroup:
    """Prompts that begin with the same `prefix`: `saved` tokens need no computing because of it alone."""

    saved: int
    rows: int
    prefix: tuple[int, ...] = field(compare=False)


@dataclass
class PromptStatistics:
    """Sums over all prompts. `limit`: the prompt length that is near the context's end."""

    limit: int
    rows: int = 0
    tokens: int = 0
    distinct_tokens: int = 0
    duplicates: int = 0
    duplicate_tokens: int = 0
    longest: int = 0
    near_limit: int = 0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    groups: list[PrefixGroup] = field(default_factory=list)
    _open: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # length and first row of each run
    _before: NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))  # the last prompt so far

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that sharing makes unnecessary to compute."""
        return self.tokens - self.distinct_tokens

    @property
    def saved_share(self) -> float:
        return self.saved_tokens / self.tokens if self.tokens else 0.0

    def add(self, part: Part) -> None:
        """The rows that come next in planned order."""
        order, common = part.plan.order, part.plan.common
        lengths = part.rows.rows["length"][order].astype(np.int64)
        before = np.concatenate([[len(self._before) if self.rows else -1], lengths[:-1]])
        same = (common == lengths) & (lengths == before)
        self.duplicates += int(np.count_nonzero(same))
        self.duplicate_tokens += int(lengths[same].sum())
        self.tokens += int(lengths.sum())
        self.distinct_tokens += part.plan.distinct_tokens
        self.longest = max(self.longest, int(lengths.max()))
        self.near_limit += int(np.count_nonzero(lengths > self.limit))
        bins = np.minimum(np.log2(np.maximum(lengths, 1)).astype(np.int64), _BINS - 1)
        self.histogram += np.bincount(bins, minlength=_BINS)
        self._add_groups(part)
        self.rows += len(lengths)
        self._before = part.last_prompt.copy()

    def close(self) -> None:
        """No part comes any more."""
        ended = list(self._ended(0, self.rows))
        self._keep([(*group, self._before[: group[0]]) for group in ended])

    def _add_groups(self, part: Part) -> None:
        order, first_row = part.plan.order, self.rows
        changes = np.flatnonzero(part.plan.common[1:] != part.plan.common[:-1]) + 1
        found = []
        for place in (0, *changes.tolist()):
            for length, above, first, rows in self._ended(int(part.plan.common[place]), first_row + place):
                holder = self._before if first < first_row else part.rows.prompt(int(order[first - first_row]))
                found.append((length, above, first, rows, holder[:length]))
        self._keep(found)

    def _ended(self, here: int, row: int) -> Iterator[tuple[int, int, int, int]]:
        """Maximal runs of neighbours that end before `row`, whose common prefix with the row before is `here` long.

        Of each: its prefix length, the length shared with more prompts anyway, its first row, its number of rows.
        """
        first = row - 1
        while self._open[-1][0] > here:
            length, first = self._open.pop()
            above = max(here, self._open[-1][0])
            if length >= _SHORTEST_PREFIX:
                yield length, above, first, row - first
        if self._open[-1][0] < here:
            self._open.append((here, first))

    def _keep(self, found: list[tuple[int, int, int, int, NDArray[np.uint32]]]) -> None:
        largest = heapq.nlargest(_GROUPS, found, key=lambda group: (group[0] - group[1]) * (group[3] - 1))
        groups = [
            PrefixGroup((length - above) * (rows - 1), rows, tuple(prefix.tolist()))
            for length, above, _, rows, prefix in largest
        ]
        self.groups = heapq.nlargest(_GROUPS, [*self.groups, *groups])

    def histogram_lines(self) -> Iterator[str]:
        """One line per power of two that occurs, with a bar."""
        filled = np.flatnonzero(self.histogram)
        for power in range(filled[0], filled[-1] + 1) if len(filled) else ():
            count = int(self.histogram[power])
            bar = "#" * max(count > 0, round(40 * count / int(self.histogram.max())))
            yield f"{1 << power:>8}-{(2 << power) - 1:<8} {count:>9}  {bar}"
