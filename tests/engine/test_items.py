"""Attention work items: every fed token sees each key at or before it exactly once, however the items are cut."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.blocks import BlockNode
from batchgen.engine.items import FULL_QUERIES, attention_items, worth_sharing
from batchgen.engine.sequence import Feed
from batchgen.kernels.attention import AttentionItems

SIZE = 16
COUNTS = st.one_of(st.integers(1, 3), st.sampled_from([FULL_QUERIES - 1, FULL_QUERIES, FULL_QUERIES + 40]))


@st.composite
def steps(draw: st.DrawFn) -> list[Feed]:
    """Feeds of rows that share the beginning of their neighbour's path, and some blocks of their own."""
    feeds: list[Feed] = []
    path: list[BlockNode] = []
    fresh = iter(range(10_000))
    for _ in range(draw(st.integers(1, 8))):
        path = path[: draw(st.integers(0, len(path)))]
        path = path + [BlockNode(next(fresh), (), None) for _ in range(draw(st.integers(0, 6)))]
        start, count = len(path) * SIZE + draw(st.integers(0, 20)), draw(COUNTS)
        own = [next(fresh) for _ in range(-(-(start + count) // SIZE) - len(path))]
        blocks = [node.block for node in path] + own
        feeds.append(Feed(SimpleNamespace(path=path, blocks=blocks, length=0, tokens=[]), start, count))
    return feeds


def seen(items: AttentionItems) -> dict[int, list[tuple[int, int]]]:
    """Of every row of the step, the (block, offset) its items let it see, by position."""
    found: dict[int, dict[int, tuple[int, int]]] = {row: {} for row in range(len(items.positions))}
    for item in range(len(items.start)):
        blocks = items.blocks[items.block_offset[item] : items.block_offset[item + 1]]
        for row in items.queries[items.query_offset[item] : items.query_offset[item + 1]]:
            end = min(items.length[item], items.positions[row] + 1 - items.start[item])
            for key in range(end):
                position = int(items.start[item]) + key
                assert position not in found[row], "a key is seen twice"
                found[row][position] = (int(blocks[key // SIZE]), key % SIZE)
    return {row: [keys[position] for position in sorted(keys)] for row, keys in found.items()}


@given(steps())
def test_every_key_is_seen_once(feeds: list[Feed]) -> None:
    keys, row = seen(attention_items(feeds, SIZE)), 0
    for feed in feeds:
        for position in range(feed.start, feed.start + feed.count):
            expected = [(feed.sequence.blocks[at // SIZE], at % SIZE) for at in range(position + 1)]
            assert keys[row] == expected
            row += 1


def test_only_feeds_that_leave_room_in_a_tile_share_an_item() -> None:
    path = [BlockNode(block, (), None) for block in range(8)]
    sequence = SimpleNamespace(path=path, blocks=list(range(20)), length=0, tokens=[])
    few, many = Feed(sequence, 128, 2), Feed(sequence, 128, FULL_QUERIES)
    items = attention_items([few] * 10 + [many] * 2, SIZE)
    assert np.diff(items.query_offset).tolist() == [20, *[2] * 10, FULL_QUERIES, FULL_QUERIES]
    assert items.start.tolist() == [0, *[128] * 10, 0, 0]


def test_an_item_of_its_own_takes_many_queries_and_many_keys() -> None:
    """As measured: 4 queries lose whatever they share, 16 gain on long runs, many from four blocks on."""
    assert not any(worth_sharing(4, keys) for keys in (64, 256, 4096))
    assert not worth_sharing(16, 64)
    assert worth_sharing(16, 256)
    assert not worth_sharing(128, 48)
    assert worth_sharing(128, 64)
    assert worth_sharing(250, 384)
