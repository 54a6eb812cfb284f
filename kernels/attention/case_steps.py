"""Steps for cases of attention: items as the engine makes them, and odd ones, laid out on blocks in shuffled order.

Knows items, positions and blocks, no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import AttentionItems, Ints


@dataclass(slots=True)
class Step:
    """Builds the items of a step sequence by sequence, on blocks in shuffled order."""

    block_size: int
    seed: int = 0
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    queries: list[list[int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def item(self, start: int, length: int, queries: Sequence[int]) -> None:
        self.start.append(start)
        self.length.append(length)
        self.queries.append(list(queries))

    def feed(self, first: int, count: int) -> list[int]:
        """Query rows for count tokens from position first on."""
        rows = list(range(len(self.positions), len(self.positions) + count))
        self.positions += range(first, first + count)
        return rows

    def sequence(self, prefix: int, cached: int, fed: int) -> list[int]:
        """A private item behind prefix positions: cached keys of its own and fed more, whose queries it returns."""
        rows = self.feed(prefix + cached, fed)
        self.item(prefix, cached + fed, rows)
        return rows

    def build(self) -> tuple[AttentionItems, int]:
        """The items and how many blocks the pages need: some are left unused."""
        counts = [-(-length // self.block_size) for length in self.length]
        num_blocks = sum(counts) + 3
        return AttentionItems(
            start=np.array(self.start, dtype=np.int64),
            length=np.array(self.length, dtype=np.int64),
            block_offset=_offsets(counts),
            blocks=np.random.default_rng(self.seed).permutation(num_blocks)[: sum(counts)].astype(np.int64),
            query_offset=_offsets([len(rows) for rows in self.queries]),
            queries=np.array([row for rows in self.queries for row in rows], dtype=np.int64),
            positions=np.array(self.positions, dtype=np.int64),
        ), num_blocks


def _offsets(counts: list[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))])


def key_slots(items: AttentionItems, item: int, block_size: int) -> Ints:
    """The slots, block * B + offset, of an item's keys."""
    blocks = items.blocks[items.block_offset[item] : items.block_offset[item + 1]]
    return (blocks[:, None] * block_size + np.arange(block_size)).ravel()[: items.length[item]]


def decode_shared(prefix: int, rows: int, block_size: int = 16) -> Step:
    """Rows that decode behind one prefix, with 20 to 300 keys of their own."""
    step = Step(block_size)
    own = np.random.default_rng(1).integers(20, 300, rows)
    queries = [row for length in own for row in step.sequence(prefix, int(length) - 1, 1)]
    step.item(0, prefix, queries)
    return step


def prefill_shared(prefix: int, rows: int, fed: int, block_size: int = 16) -> Step:
    """Rows that read their own prompts behind one cached prefix."""
    step = Step(block_size)
    queries = [row for _ in range(rows) for row in step.sequence(prefix, 0, fed)]
    step.item(0, prefix, queries)
    return step


def prefill(cached: int, fed: int, block_size: int = 16) -> Step:
    """One long prompt, or a chunk of it."""
    step = Step(block_size)
    step.sequence(0, cached, fed)
    return step


def decode(rows: int, keys: int, block_size: int = 16) -> Step:
    step = Step(block_size)
    for _ in range(rows):
        step.sequence(0, keys - 1, 1)
    return step


def mixed(block_size: int = 16) -> Step:
    """Decoding rows behind a prefix, some prompts behind it, and a chunk of an unrelated prompt."""
    step = decode_shared(608, 120, block_size)
    rows = step.queries.pop()
    step.start.pop()
    step.length.pop()
    rows += [row for _ in range(6) for row in step.sequence(608, 0, 150)]
    step.item(0, 608, rows)
    step.sequence(0, 700, 500)
    return step


def branching(block_size: int) -> Step:
    """Three levels: a prefix for all, a node for two groups, own suffixes; one query fed inside the node itself."""
    step = Step(block_size)
    edge = 2 * block_size
    left = [*step.sequence(2 * edge, 0, 5), *step.sequence(2 * edge, 3, 1)]
    right = step.sequence(2 * edge + 0, block_size, 2)
    other = step.sequence(edge, 0, 3)
    inside = step.feed(edge + 1, 1)
    step.item(edge, edge, [*left, *right, *inside])
    step.item(0, edge, [*left, *right, *other, *inside])
    return step


def forked(block_size: int) -> Step:
    """Branches behind a chunk of a prompt: each begins a block in mid-prompt, with others at the same positions."""
    step = Step(block_size)
    prompt, left = step.feed(13, 8), step.feed(21, 3)
    under, beside, right = step.feed(24, 2), step.feed(24, 1), step.feed(21, block_size + 1)
    step.item(0, 21, [*prompt, *left, *under, *beside, *right])
    step.item(21, 3, [*left, *under, *beside])
    step.item(24, 2, under)
    step.item(24, 1, beside)
    step.item(21, block_size + 1, right)
    return step


def odd() -> Step:
    """Partial last blocks, one query in four items, an item that ends inside a block of the next."""
    step = Step(8, seed=3)
    rows = step.feed(21, 3)
    step.item(0, 8, rows)
    step.item(8, 3, rows)
    step.item(8, 11, rows[:1])
    step.item(16, 8, rows)
    step.item(8, 5, rows)
    return step
