"""What sharing is worth: lengths, distinct prefix tokens and the largest groups of prompts with a common prefix.

Knows planned windows of prompts as arrays; memory does not grow with the number of windows.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
    """Sums over all windows. Prefixes are shared within a window, so many windows share a little less."""

    rows: int = 0
    tokens: int = 0
    distinct_tokens: int = 0
    duplicates: int = 0
    longest: int = 0
    near_limit: int = 0
    windows: int = 0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_BINS, np.int64))
    groups: list[PrefixGroup] = field(default_factory=list)

    @property
    def saved_share(self) -> float:
        """Share of the prompt tokens that sharing makes unnecessary to compute."""
        return 1 - self.distinct_tokens / self.tokens if self.tokens else 0.0

    def add(self, tokens: Sequence[int] | NDArray[np.uint32], starts: NDArray[np.int64], lengths: NDArray[np.int64],
            common: NDArray[np.int64], limit: int) -> None:  # fmt: skip
        """One window in planned order: prompt i is tokens[starts[i]:starts[i] + lengths[i]].

        `common[i]` is the length of its common prefix with prompt i - 1; `limit` the prompt length that is near the
        context's end.
        """
        self.windows += 1
        self.rows += len(lengths)
        self.tokens += int(lengths.sum())
        self.distinct_tokens += int(lengths.sum() - common.sum())
        if len(lengths) == 0:
            return
        self.duplicates += int(np.count_nonzero((common[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])))
        self.longest = max(self.longest, int(lengths.max()))
        self.near_limit += int(np.count_nonzero(lengths > limit))
        bins = np.minimum(np.log2(np.maximum(lengths, 1)).astype(np.int64), _BINS - 1)
        self.histogram += np.bincount(bins, minlength=_BINS)
        for length, above, first, count in _largest(common):
            start = int(starts[first])
            prefix = tuple(int(token) for token in tokens[start : start + length])
            group = PrefixGroup((length - above) * (count - 1), count, prefix)
            self.groups = heapq.nlargest(_GROUPS, [*self.groups, group])

    def histogram_lines(self) -> Iterator[str]:
        """One line per power of two that occurs, with a bar."""
        filled = np.flatnonzero(self.histogram)
        for power in range(filled[0], filled[-1] + 1) if len(filled) else ():
            count = int(self.histogram[power])
            bar = "#" * max(count > 0, round(40 * count / int(self.histogram.max())))
            yield f"{1 << power:>8}-{(2 << power) - 1:<8} {count:>9}  {bar}"


def _largest(common: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """(prefix length, length shared with more prompts anyway, first prompt, prompts) of the groups that save most."""
    return heapq.nlargest(_GROUPS, _groups(common.tolist()), key=lambda group: (group[0] - group[1]) * (group[3] - 1))


def _groups(common: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Every maximal run of neighbours with a common prefix longer than that of any larger run around it."""
    open_runs: list[tuple[int, int]] = [(0, 0)]
    for index in range(1, len(common) + 1):
        here = common[index] if index < len(common) else 0
        first = index - 1
        while open_runs[-1][0] > here:
            length, first = open_runs.pop()
            above = max(here, open_runs[-1][0])
            if length >= _SHORTEST_PREFIX:
                yield length, above, first, index - first
        if open_runs[-1][0] < here:
            open_runs.append((here, first))
