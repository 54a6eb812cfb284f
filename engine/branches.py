"""Where the tokens of a sequence stand: their positions, the places of their keys, and who sees them, if they fork.

Tokens are known by their index in the sequence. A place is a slot of the sequence's own blocks, counted from their
first; which blocks these are, and what the tokens mean, is not known here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Keys of tokens with one way through them, in blocks of their own, and the fed tokens that see them."""

    position: int  # of the first
    length: int
    block: int  # number of the sequence's block that begins with the first
    queries: tuple[int, int]  # half-open, counted from the first token that is fed


class Course(Protocol):
    """How the tokens of one sequence follow each other."""

    def positions(self, start: int, end: int) -> Ints:
        """Of the tokens start .. end."""
        ...

    def places(self, start: int, end: int, block_size: int) -> Ints:
        """Of the tokens start .. end, rising."""
        ...

    def extent(self, length: int, block_size: int) -> int:
        """How many places the first `length` tokens reach over."""
        ...

    def chain(self, length: int) -> int:
        """How many of the first `length` tokens all later ones see."""
        ...

    def runs(self, start: int, end: int, block_size: int) -> Iterator[Run]:
        """What tokens among start .. end see behind the chain, up to the last of them."""
        ...


class Straight:
    """One token behind the other."""

    def positions(self, start: int, end: int) -> Ints:
        return np.arange(start, end)

    def places(self, start: int, end: int, block_size: int) -> Ints:
        return np.arange(start, end)

    def extent(self, length: int, block_size: int) -> int:
        return length

    def chain(self, length: int) -> int:
        return length

    def runs(self, start: int, end: int, block_size: int) -> Iterator[Run]:
        return iter(())


STRAIGHT = Straight()


@dataclass(frozen=True, eq=False)
class Branches:
    """Tokens behind a prompt that fork: depth first, what follows a token before what stands beside it.

    The first `trunk` of them have no others beside them. The rest are runs with one way through each: run r is
    first[r] .. end[r], and it and what follows it are first[r] .. last[r].
    """

    tokens: tuple[int, ...]
    depth: Ints  # of a token: how many stand between it and the prompt
    trunk: int
    first: Ints
    end: Ints
    last: Ints


def branches_of(paths: Iterable[tuple[int, ...]]) -> tuple[Branches, dict[tuple[int, ...], int]]:
    """The branches in which each of these ways can be gone, every common start once; and where each start ends."""
    nodes = sorted({path[: at + 1] for path in paths for at in range(len(path))})
    children = Counter(node[:-1] for node in nodes)
    first = [at for at, node in enumerate(nodes) if children[node[:-1]] > 1]
    last = [
        next((at for at in range(start + 1, len(nodes)) if len(nodes[at]) <= len(nodes[start])), len(nodes))
        for start in first
    ]
    branches = Branches(
        tokens=tuple(node[-1] for node in nodes),
        depth=np.array([len(node) - 1 for node in nodes], np.int64),
        trunk=first[0] if first else len(nodes),
        first=np.array(first, np.int64),
        end=np.array([*first[1:], len(nodes)][: len(first)], np.int64),
        last=np.array(last, np.int64),
    )
    return branches, {(): -1, **{node: at for at, node in enumerate(nodes)}}


@dataclass(frozen=True, slots=True)
class Forked:
    """A prompt with branches behind it: the trunk goes on in its blocks, every other run begins a block of its own."""

    branches: Branches
    prompt_length: int

    def positions(self, start: int, end: int) -> Ints:
        prompt = self.prompt_length
        behind = self.branches.depth[max(start - prompt, 0) : max(end - prompt, 0)]
        return np.concatenate([np.arange(start, min(end, prompt)), prompt + behind])

    def places(self, start: int, end: int, block_size: int) -> Ints:
        chain = self.prompt_length + self.branches.trunk
        index = np.arange(max(start, chain), end) - self.prompt_length
        run = np.searchsorted(self.branches.first, index, side="right") - 1
        forked = self._blocks(block_size)[run] * block_size + index - self.branches.first[run]
        return np.concatenate([np.arange(start, min(end, chain)), forked])

    def extent(self, length: int, block_size: int) -> int:
        return int(self.places(length - 1, length, block_size)[0]) + 1

    def chain(self, length: int) -> int:
        return min(length, self.prompt_length + self.branches.trunk)

    def runs(self, start: int, end: int, block_size: int) -> Iterator[Run]:
        branches, prompt = self.branches, self.prompt_length
        spans = zip(branches.first.tolist(), branches.end.tolist(), branches.last.tolist(), strict=True)
        blocks = self._blocks(block_size).tolist()
        for block, (first, stop, last) in zip(blocks, spans, strict=True):
            queries = max(first + prompt, start) - start, min(last + prompt, end) - start
            if queries[0] < queries[1]:
                length = min(stop + prompt, end) - first - prompt
                yield Run(prompt + int(branches.depth[first]), length, block, queries)

    def _blocks(self, block_size: int) -> Ints:
        """The number of the block in which each run begins."""
        sizes = (self.branches.end - self.branches.first).tolist()
        chain = -(-(self.prompt_length + self.branches.trunk) // block_size)
        counts = accumulate((-(-size // block_size) for size in sizes), initial=chain)
        return np.array(list(counts)[: len(sizes)], np.int64)
