"""How the work items of a step become tasks of the native kernel: (run of queries, run of keys), dearest first.

Knows costs and limits, in NumPy on the host; the kernel clips each task to what its layer's window leaves.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import AttentionItems, Ints

MAX_LANES = 256  # of a task: queries times the query heads of a key/value head
NARROW_LANES = 16  # tasks of so few lanes read every key in place
PART_LANES = 4  # of them that pass a key together
UNIT_LANES = 16  # of all heads that such a task takes at once
UNIT_NUMBERS = 256  # of the keys at one position in these heads: what is fetched ahead stays in the first cache
VECTOR = 16  # lanes worked on at once
MIN_KEYS = 256  # a run of keys is not cut shorter
TASKS_PER_THREAD = 8  # wanted at least, so that threads finish together
NARROW_COST = 0.5  # of one key and PART_LANES, in units of one key of a vector of lanes on the wide path
PACK_COST = 1.0  # of one key on the wide path, whatever the lanes


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of the layers that a layout serves."""

    group: int  # query heads of a key/value head
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Tasks:
    """Columns of one task each, and which queries have how many partial results."""

    item: Ints
    first_query: Ints  # counted in the list of queries of all items
    num_queries: Ints
    first_key: Ints  # counted in the item, a multiple of the block size
    num_keys: Ints
    first_partial: Ints  # row of the first query's partial result
    num_heads: Ints  # key/value heads that a thread takes at once
    counts: Ints  # [T] partial results of every query

    @property
    def num_partials(self) -> int:
        return int(self.num_queries.sum())


def make_tasks(items: AttentionItems, block_size: int, heads: Heads, threads: int) -> Tasks:
    """Tasks for all heads. Raises ValueError when a query sees no key."""
    group = heads.group
    most = max(1, MAX_LANES // group)
    item, first_query, num_queries = split(np.diff(items.query_offset), most)
    first_query = first_query + items.query_offset[item]
    num_keys = visible_keys(items, item, first_query, num_queries)
    cost = task_cost(num_queries * group, num_keys)
    share = cost.sum() * heads.num_kv_heads / (threads * TASKS_PER_THREAD)
    parts = np.ceil(cost / max(share, 1.0)) if threads > 1 else np.ones_like(cost)
    parts = np.clip(parts, 1, np.maximum(num_keys // MIN_KEYS, 1)).astype(np.int64)
    blocks = -(-num_keys // block_size)
    row, first_block, num_blocks = split(blocks, np.maximum(-(-blocks // parts), 1))
    first_key = first_block * block_size
    num_keys = np.minimum(num_blocks * block_size, num_keys[row] - first_key)
    num_heads = heads_at_once(num_queries[row] * group, heads, threads)
    order = np.argsort(-task_cost(num_queries[row] * group, num_keys) * num_heads, kind="stable")
    row, first_key, num_keys, num_heads = row[order], first_key[order], num_keys[order], num_heads[order]
    num_queries, first_query = num_queries[row], first_query[row]
    counts = np.bincount(items.queries[expand(first_query, num_queries)], minlength=len(items.positions))
    if not counts.all():
        raise ValueError(f"attention: query {int(np.argmin(counts))} of the step sees no keys")
    first_partial = np.cumsum(num_queries) - num_queries
    return Tasks(item[row], first_query, num_queries, first_key, num_keys, first_partial, num_heads, counts)


def heads_at_once(lanes: Ints, heads: Heads, threads: int) -> Ints:
    """Key/value heads that a task of so many lanes a head takes, where enough tasks are left for all threads."""
    narrow = lanes <= NARROW_LANES
    tasks = np.where(narrow, 1, heads.num_kv_heads).sum()
    if threads > 1 and tasks < threads * TASKS_PER_THREAD:
        return np.ones_like(lanes)
    most = np.minimum(UNIT_LANES // np.maximum(lanes, 1), max(1, UNIT_NUMBERS // heads.head_dim))
    parts = -(-heads.num_kv_heads // np.maximum(most, 1))
    at_once: Ints = np.where(narrow, -(-heads.num_kv_heads // parts), 1)
    return at_once


def task_cost(lanes: Ints, num_keys: Ints) -> NDArray[np.float64]:
    """Predicted time of a task, in units of one key of a vector of lanes."""
    narrow, wide = -(-lanes // PART_LANES) * NARROW_COST, -(-lanes // VECTOR) + PACK_COST
    per_key = np.where(lanes <= NARROW_LANES, narrow, wide).astype(np.float64)
    cost: NDArray[np.float64] = num_keys * per_key
    return cost


def expand(first: Ints, count: Ints) -> Ints:
    """first[0], first[0] + 1, .. first[0] + count[0] - 1, first[1], .."""
    expanded: Ints = np.arange(int(count.sum())) + np.repeat(first - (np.cumsum(count) - count), count)
    return expanded


def split(sizes: Ints, most: Ints | int) -> tuple[Ints, Ints, Ints]:
    """Cuts each size into equal parts of at most `most`: owner, beginning and size of every part."""
    parts = -(-sizes // most)
    owner = np.repeat(np.arange(len(sizes)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    share = -(-sizes[owner] // parts[owner])
    begin = part * share
    return owner, begin, np.maximum(np.minimum(sizes[owner] - begin, share), 0)


def visible_keys(items: AttentionItems, item: Ints, first: Ints, count: Ints) -> Ints:
    """How many of an item's keys lie at or before the last of count queries."""
    if not len(item):
        return item
    positions = np.append(items.positions[items.queries], 0)  # an edge may lie behind the last query
    edges = np.stack([first, first + count], axis=1).ravel()
    last = np.maximum.reduceat(positions, edges)[::2]
    visible: Ints = np.clip(last + 1 - items.start[item], 0, items.length[item])
    return visible
