"""The end of a run: long answers first, and only as many at once as keep steps full until the last of them ends.

Knows lengths, common prefixes and a simulated device; what runs, and what it is asked, is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

GRAIN = 8  # steps after which the simulated limit is looked at again
LARGEST = 10_000  # rows; the end of more is too small a part
LEAST_GAIN = 1.05


def sequence_limit(work: int, longest: int, ridge: int, most: int) -> int:
    """How many answers to compute at once: work / longest, not below the ridge, not above `most`.

    Past the ridge a step takes a time per answer in it, so the longest answer alone takes its length times the answers
    beside it, and all takes `work`: with more at once the longest ends last, and alone. `work` and `longest` are
    tokens still to come.
    """
    return min(most, max(ridge, work // longest)) if longest > 0 else most


def makespan(lengths: Sequence[int], most: int, ridge: int, limited: bool) -> int:
    """Time to compute answers in this order on a device whose step of B answers takes max(ridge, B); admission alone
    is limited.
    """
    longest = suffix_maxima(lengths)
    ends: list[int] = []
    time = step = last = first = 0
    work = sum(lengths)
    while first < len(lengths) or ends:
        limit = sequence_limit(work, max(last - step, longest[first]), ridge, most) if limited else most
        while first < len(lengths) and len(ends) < limit:
            heappush(ends, step + lengths[first])
            last = max(last, step + lengths[first])
            first += 1
        count = min(ends[0] - step, GRAIN if limited and first < len(lengths) else last)
        time, step, work = time + count * max(ridge, len(ends)), step + count, work - count * len(ends)
        while ends and ends[0] <= step:
            heappop(ends)
    return time


def suffix_maxima(lengths: Sequence[int]) -> list[int]:
    """At i the largest from i on, and 0 behind the end."""
    return list(accumulate(reversed(lengths), max, initial=0))[::-1]


def limit_pays(lengths: Sequence[int], most: int, ridge: int) -> bool:
    """Whether the simulated device is done earlier with the limit than without."""
    if len(lengths) > LARGEST or len(set(lengths)) < 2:
        return False
    free, limited = (makespan(lengths, most, ridge, limited=choice) for choice in (False, True))
    return free > LEAST_GAIN * limited


@dataclass(slots=True)
class _Branch:
    """Rows that share `depth` tokens: places or branches, each with the longest answer in it."""

    depth: int
    parts: "list[tuple[int, int | _Branch]]" = field(default_factory=list)

    @property
    def longest(self) -> int:
        return max(length for length, _ in self.parts)


def longest_first(common: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The places of a depth-first order, children with longer answers first, so that as much is shared as before.

    `common[i]`: how many tokens row i shares with the one before; `lengths[i]`: of its answer. Stable.
    """
    order: list[int] = []
    todo: list[int | _Branch] = [_tree(common, lengths)]
    while todo:
        part = todo.pop()
        if isinstance(part, _Branch):
            todo += [child for _, child in sorted(part.parts, key=lambda one: -one[0])][::-1]
        else:
            order.append(part)
    return order


def _tree(common: Sequence[int], lengths: Sequence[int]) -> _Branch:
    """The branches of a depth-first order, by how much neighbours share."""
    path = [_Branch(0)]
    for place, length in enumerate(lengths):
        _close(path, common[place] if place else 0)
        behind = common[place + 1] if place + 1 < len(lengths) else 0
        if behind > path[-1].depth:
            path.append(_Branch(behind))
        path[-1].parts.append((length, place))
    _close(path, 0)
    return path[0]


def _close(path: list[_Branch], depth: int) -> None:
    """Ends the branches deeper than `depth`; the next row hangs there."""
    while path[-1].depth > depth:
        branch = path.pop()
        if path[-1].depth < depth:
            path.append(_Branch(depth))
        path[-1].parts.append((branch.longest, branch))
