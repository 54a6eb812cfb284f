"""Attention work items of a step: which runs of cached keys are read once for several sequences, which for one.

Walks the tree that the feeds' prompt blocks form; knows block ids and counts, no tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..kernels.attention import AttentionItems
from .sequence import Feed, Sequence
from .sharing import Sharing

FULL_QUERIES = 64  # a feed of as many fills tiles by itself: it reads what it shares once more, and merges nothing


@dataclass(slots=True)
class _Builder:
    """Grows the arrays of AttentionItems item by item."""

    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    block_offsets: list[int] = field(default_factory=lambda: [0])
    query_ranges: list[tuple[int, int]] = field(default_factory=list)

    def add(self, start: int, length: int, blocks: list[int], queries: tuple[int, int]) -> None:
        """Keys from position `start` on, in these blocks, for the step's rows in the half-open range `queries`."""
        self.starts.append(start)
        self.lengths.append(length)
        self.blocks += blocks
        self.block_offsets.append(len(self.blocks))
        self.query_ranges.append(queries)

    def build(self, positions: np.ndarray) -> AttentionItems:
        first, end = np.array(self.query_ranges, dtype=np.int64).reshape(-1, 2).T
        offset = np.concatenate([[0], np.cumsum(end - first)])
        return AttentionItems(
            start=np.array(self.starts, dtype=np.int64),
            length=np.array(self.lengths, dtype=np.int64),
            block_offset=np.array(self.block_offsets, dtype=np.int64),
            blocks=np.array(self.blocks, dtype=np.int64),
            query_offset=offset,
            queries=np.arange(offset[-1]) + np.repeat(first - offset[:-1], end - first),
            positions=positions,
        )


def attention_items(feeds: list[Feed], block_size: int, sharing: Sharing) -> AttentionItems:
    """Items for the feeds of a step, whose rows lie one feed behind the other, neighbours in plan order."""
    builder = _Builder()
    offsets = np.cumsum([0, *(feed.count for feed in feeds)]).tolist()
    common = [0, *(common_depth(a, b) for a, b in pairwise(feeds)), 0]
    shared = list(segments(common, offsets, block_size, sharing))
    for first, last, above, below in shared:
        path = feeds[first].sequence.path
        blocks = [node.block for node in path[above:below]]
        builder.add(above * block_size, (below - above) * block_size, blocks, (offsets[first], offsets[last]))
    own_from = private_depths(shared, len(feeds))
    for index, (feed, depth) in enumerate(zip(feeds, own_from, strict=True)):
        blocks, course, first = feed.sequence.blocks, feed.sequence.course, offsets[index]
        end = course.chain(feed.start + feed.count)
        own, start = blocks[depth : -(-end // block_size)], depth * block_size
        builder.add(start, end - start, own, (first, offsets[index + 1]))
        for run in course.runs(feed.start, feed.start + feed.count, block_size):
            own = blocks[run.block : run.block - (-run.length // block_size)]
            builder.add(run.position, run.length, own, (first + run.queries[0], first + run.queries[1]))
    positions = [feed.sequence.course.positions(feed.start, feed.start + feed.count) for feed in feeds]
    return builder.build(np.concatenate(positions))


def common_depth(first: Feed, second: Feed) -> int:
    """How many leading blocks two feeds may read together."""
    if max(first.count, second.count) >= FULL_QUERIES:
        return 0
    return shared_depth(first.sequence, second.sequence)


def shared_depth(first: Sequence, second: Sequence) -> int:
    """How many leading blocks two sequences hold in common. Paths of a tree: equal at one depth, equal above it."""
    low, high = 0, min(len(first.path), len(second.path))
    while low < high:
        middle = (low + high + 1) // 2
        if first.path[middle - 1] is second.path[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def segments(
    common: list[int], offsets: list[int], block_size: int, sharing: Sharing
) -> Iterator[tuple[int, int, int, int]]:
    """Shared runs of blocks worth an item: (first feed, last feed + 1, first block, last block + 1).

    common[i] is the shared depth of feeds i-1 and i, with zeros at both ends. A run is the path piece below which a
    group of neighbours still agrees; one with few queries or few keys is left to the groups below it.
    """
    stack = [(0, len(common) - 1, 0)]
    while stack:
        first, last, above = stack.pop()
        if last - first < 2:
            continue
        inner = common[first + 1 : last]
        below = min(inner)
        if below > above and sharing.pays(offsets[last] - offsets[first], (below - above) * block_size):
            yield first, last, above, below
            above = below
        cuts = [first, *(first + 1 + i for i, depth in enumerate(inner) if depth == below), last]
        stack += [(start, end, above) for start, end in pairwise(cuts)]


def private_depths(shared: list[tuple[int, int, int, int]], num_feeds: int) -> list[int]:
    """For every feed the block at which its own item starts: behind the last shared run it belongs to."""
    depths = [0] * num_feeds
    for first, last, _, below in shared:
        for index in range(first, last):
            depths[index] = max(depths[index], below)
    return depths
