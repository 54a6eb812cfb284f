"""How the work items of a step become few dense batches for the CPU: tiles of (queries, keys) of nearly equal shape.

Knows positions, blocks, masks and padding, in NumPy on the host; knows no tensors and does no attention.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import AttentionItems, Ints

QUERY_TILE = 256  # queries of one tile at most
SCORE_BUDGET = 2_000_000  # scores of one batch: 8 MB in float32
KEY_BUDGET = 2_000_000  # elements of gathered keys in one batch: 8 MB in float32
MAX_CLASSES = 64  # distinct tile shapes that the search for batches looks at
BATCH_COST = 100.0  # what one more batch costs, in the unit of `_tile_cost`: microseconds
FLOP_PER_UNIT = 200_000.0
ELEMENTS_PER_UNIT = 6_000.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a model and a layer the layout depends on."""

    num_heads: int  # Q
    num_kv_heads: int  # K
    head_dim: int  # D
    block_size: int  # B
    window: int | None

    def most_queries(self) -> int:
        """Queries of a tile at most: so that twice as many keys fit the budget of scores."""
        return min(QUERY_TILE, max(1, math.isqrt(SCORE_BUDGET // (2 * self.num_heads))))

    def most_blocks(self, num_queries: Ints) -> Ints:
        """Blocks of a tile with so many queries at most, so that its scores and its keys fit their budgets."""
        by_scores = SCORE_BUDGET // (num_queries * self.num_heads)
        keys: Ints = np.minimum(by_scores, KEY_BUDGET // (self.num_kv_heads * self.head_dim))
        blocks: Ints = np.maximum(keys // self.block_size, 1)
        return blocks


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rectangles of items: num_queries of an item's list from first_query on, num_blocks from first_block on."""

    item: Ints
    first_query: Ints
    num_queries: Ints
    first_block: Ints
    num_blocks: Ints

    def __len__(self) -> int:
        return len(self.item)

    def take(self, chosen: NDArray[np.generic]) -> "Tiles":
        fields = (self.item, self.first_query, self.num_queries, self.first_block, self.num_blocks)
        return Tiles(*(field[chosen] for field in fields))


@dataclass(frozen=True, slots=True)
class TileBatch:
    """G tiles padded to n queries and m keys. Padding repeats what the tile has and is masked or never read."""

    queries: Ints  # [G, n] rows of the step
    present: NDArray[np.bool_]  # [G, n] false: padding
    blocks: Ints  # [G, m / B]
    stale: Ints  # flat indices into [G, m] of slots that hold no key of the item
    hidden: NDArray[np.bool_] | None  # [G, n, m] true: the query does not see the key; None: all is seen


def make_batches(items: AttentionItems, geometry: Geometry) -> list[TileBatch]:
    """The batches of one step for layers of one geometry. Raises ValueError when a query is in no item."""
    tiles = cut_tiles(items, geometry)
    batches = [fill(items, tiles.take(chosen), geometry) for chosen in group(tiles, geometry)]
    covered = np.zeros(len(items.positions), dtype=bool)
    for batch in batches:
        covered[batch.queries] = True
    if not covered.all():
        raise ValueError(f"attention: query {int(np.argmin(covered))} of the step sees no keys")
    return batches


def cut_tiles(items: AttentionItems, geometry: Geometry) -> Tiles:
    """All tiles in which at least one query sees at least one key."""
    item, first_query, num_queries = _split(np.diff(items.query_offset), geometry.most_queries())
    low, high = _visible_keys(items, geometry, item, first_query, num_queries)
    first_block = low // geometry.block_size
    seen_blocks = np.where(high > low, -(-high // geometry.block_size) - first_block, 0)
    rows, offset, num_blocks = _split(seen_blocks, geometry.most_blocks(num_queries))
    return Tiles(item[rows], first_query[rows], num_queries[rows], first_block[rows] + offset, num_blocks)


def _split(sizes: Ints, most: Ints | int) -> tuple[Ints, Ints, Ints]:
    """Cuts each size into equal parts of at most `most`: owner, beginning and size of every part."""
    parts = -(-sizes // most)
    owner = np.repeat(np.arange(len(sizes)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    share = -(-sizes[owner] // parts[owner])
    begin = part * share
    return owner, begin, np.minimum(sizes[owner] - begin, share)


def _visible_keys(items: AttentionItems, geometry: Geometry, item: Ints, first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """The range of an item's keys that any of count queries from `first` on may see."""
    if not len(item):
        return item, item
    begin = items.query_offset[item] + first
    positions = items.positions[items.queries]
    edges = np.stack([begin, begin + count], axis=1).ravel()
    padded = np.append(positions, 0)  # an edge may lie behind the last query
    high = np.clip(np.maximum.reduceat(padded, edges)[::2] + 1 - items.start[item], 0, items.length[item])
    if geometry.window is None:
        return np.zeros_like(high), high
    lowest = np.minimum.reduceat(padded, edges)[::2] - geometry.window + 1
    return np.maximum(lowest - items.start[item], 0), high


def group(tiles: Tiles, geometry: Geometry) -> Iterator[Ints]:
    """Indices of tiles that make one batch, within the budgets."""
    shapes = np.stack([_round_up(tiles.num_queries), _round_up(tiles.num_blocks)], axis=1)
    classes, member, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(member.ravel(), kind="stable")
    ends = np.concatenate([[0], np.cumsum(counts)])
    for begin, end in choose_cuts(classes, counts, geometry):
        yield from _within_budget(tiles, order[ends[begin] : ends[end]], geometry)


def _round_up(sizes: Ints) -> Ints:
    """Sizes on a ladder of eight steps an octave, so that there are few distinct ones."""
    if not len(sizes):
        return sizes
    step: Ints = 2 ** np.maximum(np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) - 3, 0)
    rounded: Ints = -(-sizes // step) * step
    return rounded


def choose_cuts(classes: Ints, counts: Ints, geometry: Geometry) -> list[tuple[int, int]]:
    """Cuts the sorted shape classes [C, 2] into runs that share a batch, at the least total cost.

    Padding makes a long run dear, the calls of a batch a short one; the best cut is found by dynamic programming.
    """
    best = [0.0]
    back = [0]
    total = np.concatenate([[0], np.cumsum(counts)])
    for end in range(1, len(classes) + 1):
        begin = max(0, end - MAX_CLASSES)
        widest = np.maximum.accumulate(classes[begin:end][::-1], axis=0)[::-1]
        padded = (total[end] - total[begin:end]) * _tile_cost(widest[:, 0], widest[:, 1], geometry)
        cost = np.asarray(best[begin:end]) + padded + BATCH_COST
        choice = int(np.argmin(cost))
        best.append(float(cost[choice]))
        back.append(begin + choice)
    cuts = []
    end = len(classes)
    while end:
        cuts.append((back[end], end))
        end = back[end]
    return cuts[::-1]


def _tile_cost(num_queries: Ints, num_blocks: Ints, geometry: Geometry) -> NDArray[np.float64]:
    keys = num_blocks * geometry.block_size
    flop = 4.0 * num_queries * keys * geometry.num_heads * geometry.head_dim
    elements = 2.0 * keys * geometry.num_kv_heads * geometry.head_dim
    return flop / FLOP_PER_UNIT + elements / ELEMENTS_PER_UNIT


def _within_budget(tiles: Tiles, chosen: Ints, geometry: Geometry) -> Iterator[Ints]:
    keys = int(tiles.num_blocks[chosen].max()) * geometry.block_size
    scores = int(tiles.num_queries[chosen].max()) * keys * geometry.num_heads
    elements = keys * geometry.num_kv_heads * geometry.head_dim
    most = max(1, min(SCORE_BUDGET // scores, KEY_BUDGET // elements))
    parts = -(-len(chosen) // most)
    yield from np.array_split(chosen, parts)


def fill(items: AttentionItems, tiles: Tiles, geometry: Geometry) -> TileBatch:
    """The indices and the mask of one batch."""
    size = geometry.block_size
    row = np.arange(int(tiles.num_queries.max()))
    present = row < tiles.num_queries[:, None]
    offset = items.query_offset[tiles.item] + tiles.first_query
    queries = items.queries[offset[:, None] + np.where(present, row, 0)]
    column = np.arange(int(tiles.num_blocks.max()))
    block = tiles.first_block[:, None] + np.where(column < tiles.num_blocks[:, None], column, 0)
    blocks = items.blocks[items.block_offset[tiles.item][:, None] + block]
    used = items.length[tiles.item][:, None] - block * size
    stale = np.flatnonzero(np.arange(size) >= used[..., None])
    return TileBatch(queries, present, blocks, stale, _hidden(items, tiles, queries, len(column) * size, geometry))


def _hidden(
    items: AttentionItems, tiles: Tiles, queries: Ints, num_keys: int, geometry: Geometry
) -> NDArray[np.bool_] | None:
    begin = tiles.first_block * geometry.block_size
    end = np.minimum(tiles.num_blocks * geometry.block_size, items.length[tiles.item] - begin)
    position = items.positions[queries] - (items.start[tiles.item] + begin)[:, None]  # of the query, in tile keys
    high = np.minimum(position + 1, end[:, None])
    key = np.arange(num_keys)
    low = np.zeros_like(high) if geometry.window is None else position - geometry.window + 1
    if (high >= num_keys).all() and (low <= 0).all():
        return None
    hidden: NDArray[np.bool_] = (key >= high[..., None]) | (key < low[..., None])
    return hidden
