"""Which worker computes which rows: the plan order is cut into pieces, and whoever runs dry takes over from others.

Knows requests in plan order and their estimated cost; not how a worker is reached.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import numpy as np

from batchgen.engine.plan import common_prefix
from batchgen.engine.request import Request

PIECES_PER_WORKER = 8  # of one batch of rows: what the last worker may have left when the others are done, at most
BATCH_ROWS = 65_536  # rows looked ahead at once
BATCH_TOKENS = 16_000_000
_SLACK = 0.25  # of a piece's cost: how far a cut may move to where less is shared
_ANSWER_SHARE = 0.5  # of max_tokens: what an answer is taken to need


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of the plan order; `cost` in tokens to compute."""

    requests: Sequence[Request]
    cost: float


def cut(requests: Sequence[Request], num_pieces: int) -> list[Piece]:
    """At most `num_pieces` pieces of about equal cost, cut where neighbours share least.

    A row costs the prompt tokens it does not share with the row before, and the answer it may get. A cut makes the
    prefix of the row behind it be computed once more, so it moves, within a quarter of a piece, to the smallest one.
    """
    if not requests:
        return []
    prompts = [np.asarray(request.prompt, np.uint32) for request in requests]
    common = [0, *(common_prefix(one, other) for one, other in pairwise(prompts))]
    costs = [
        len(request.prompt) - shared + _ANSWER_SHARE * request.sampling.max_tokens * request.sampling.n
        for request, shared in zip(requests, common, strict=True)
    ]
    ends = list(accumulate(costs))
    edges = [0, *_cuts(ends, common, num_pieces), len(requests)]
    return [
        Piece(requests[start:stop], ends[stop - 1] - (ends[start - 1] if start else 0))
        for start, stop in pairwise(edges)
        if start < stop
    ]


def _cuts(ends: Sequence[float], common: Sequence[int], num_pieces: int) -> Iterator[int]:
    """Indices of the rows before which a cut goes, ascending."""
    size = ends[-1] / num_pieces
    last = 0
    low = high = 0
    for wanted in (size * number for number in range(1, num_pieces)):
        while low < len(ends) and ends[low] < wanted - _SLACK * size:
            low += 1
        high = max(high, low)
        while high < len(ends) and ends[high] <= wanted + _SLACK * size:
            high += 1
        nearby = range(max(low, last + 1), min(high + 1, len(ends)))
        if nearby:
            last = min(nearby, key=lambda at: (common[at], abs(ends[at - 1] - wanted)))
            yield last


class Pieces:
    """Hands out the pieces of an endless stream of requests; safe to use from one thread per worker.

    Each worker has an interval of the plan order and takes its pieces one after the other, so that what they share
    stays with it. A worker whose interval is used up gets the later half of the largest one that is left.
    """

    def __init__(self, requests: Iterable[Request], num_workers: int) -> None:
        self._requests = iter(requests)
        self._num_workers = num_workers
        self._intervals: list[deque[Piece]] = [deque() for _ in range(num_workers)]
        self._returned: deque[Piece] = deque()
        self._exhausted = False
        self._lock = threading.Lock()

    def take(self, worker: int) -> Piece | None:
        """The next piece for a worker; None when nothing is left to hand out."""
        with self._lock:
            if self._returned:
                return self._returned.popleft()
            if not self._intervals[worker] and not self._steal(worker):
                self._fill()
            if not self._intervals[worker]:
                self._steal(worker)
            own = self._intervals[worker]
            return own.popleft() if own else None

    def give_back(self, requests: Sequence[Request]) -> None:
        """Rows of a worker that is gone are handed out again, before all others."""
        if requests:
            with self._lock:
                self._returned.append(Piece(requests, 0.0))

    def _steal(self, worker: int) -> bool:
        """Whether another interval had pieces to give."""
        richest = max(self._intervals, key=lambda interval: sum(piece.cost for piece in interval))
        if not richest:
            return False
        for _ in range(-(-len(richest) // 2)):
            self._intervals[worker].appendleft(richest.pop())
        return True

    def _fill(self) -> None:
        """Reads on, and gives every worker an interval of equal cost of what came."""
        if self._exhausted:
            return
        batch = list(_bounded(self._requests))
        self._exhausted = not batch
        pieces = cut(batch, PIECES_PER_WORKER * self._num_workers)
        size = sum(piece.cost for piece in pieces) / self._num_workers
        before = 0.0
        for piece in pieces:
            self._intervals[min(int((before + piece.cost / 2) / size), self._num_workers - 1)].append(piece)
            before += piece.cost


def _bounded(requests: Iterator[Request]) -> Iterator[Request]:
    """The next rows, as many as one look ahead may hold."""
    tokens = 0
    for request in islice(requests, BATCH_ROWS):
        yield request
        tokens += len(request.prompt)
        if tokens >= BATCH_TOKENS:
            return
