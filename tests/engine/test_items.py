"""Attention work items: every fed token sees each key at or before it exactly once, however the items are cut."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.blocks import BlockNode
from batchgen.engine.branches import STRAIGHT, Forked, branches_of
from batchgen.engine.items import FULL_QUERIES, attention_items
from batchgen.engine.sequence import Feed
from batchgen.engine.sharing import Sharing
from batchgen.kernels.attention import AttentionItems

SIZE = 16
SHARING = Sharing(4.0, 0.5, 28.0)
COSTS = st.floats(0, 4)
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
        feeds.append(
            Feed(SimpleNamespace(path=path, blocks=blocks, length=0, tokens=[], course=STRAIGHT), start, count)
        )
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


@given(steps(), st.builds(Sharing, COSTS, COSTS, st.floats(0, 100)))
def test_every_key_is_seen_once(feeds: list[Feed], sharing: Sharing) -> None:
    keys, row = seen(attention_items(feeds, SIZE, sharing)), 0
    for feed in feeds:
        for position in range(feed.start, feed.start + feed.count):
            expected = [(feed.sequence.blocks[at // SIZE], at % SIZE) for at in range(position + 1)]
            assert keys[row] == expected
            row += 1


WAYS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=8)


@given(WAYS, st.integers(1, 40), st.data())
def test_a_token_of_a_branch_sees_the_way_to_itself(
    ways: list[tuple[int, ...]], prompt: int, data: st.DataObject
) -> None:
    """However the tokens are cut into steps. Each common start stands once, each token in a place of its own."""
    branches, ends = branches_of(ways)
    assert {branches.tokens[at] for node, at in ends.items() if node} <= {0, 1, 2}
    assert len(ends) - 1 == len(branches.tokens) == len({way[: at + 1] for way in ways for at in range(len(way))})
    course, length = Forked(branches, prompt), prompt + len(branches.tokens)
    places = course.places(0, length, SIZE).tolist()
    assert sorted(set(places)) == places
    assert [course.extent(end, SIZE) for end in range(1, length + 1)] == [place + 1 for place in places]
    blocks = [100 + block for block in range(-(-course.extent(length, SIZE) // SIZE))]
    sequence = SimpleNamespace(path=[], blocks=blocks, length=length, tokens=[], course=course)
    start = data.draw(st.integers(0, length - 1))
    feed = Feed(sequence, start, data.draw(st.integers(1, length - start)))
    keys = seen(attention_items([feed], SIZE, SHARING))
    ways_to = {at: [*range(at + 1)] for at in range(prompt)}
    ways_to |= {
        prompt + at: [*range(prompt), *(prompt + ends[node[: end + 1]] for end in range(len(node)))]
        for node, at in ends.items()
        if node
    }
    for row in range(feed.count):
        expected = [(blocks[places[at] // SIZE], places[at] % SIZE) for at in ways_to[start + row]]
        assert keys[row] == expected


def test_only_feeds_that_leave_room_in_a_tile_share_an_item() -> None:
    path = [BlockNode(block, (), None) for block in range(8)]
    sequence = SimpleNamespace(path=path, blocks=list(range(20)), length=0, tokens=[], course=STRAIGHT)
    few, many = Feed(sequence, 128, 2), Feed(sequence, 128, FULL_QUERIES)
    items = attention_items([few] * 10 + [many] * 2, SIZE, SHARING)
    assert np.diff(items.query_offset).tolist() == [20, *[2] * 10, FULL_QUERIES, FULL_QUERIES]
    assert items.start.tolist() == [0, *[128] * 10, 0, 0]


def test_what_sharing_costs_decides_who_shares() -> None:
    path = [BlockNode(block, (), None) for block in range(8)]
    sequence = SimpleNamespace(path=path, blocks=list(range(20)), length=0, tokens=[], course=STRAIGHT)
    feeds = [Feed(sequence, 128, 1)] * 4
    assert attention_items(feeds, SIZE, SHARING).start.tolist() == [0] * 4
    assert attention_items(feeds, SIZE, Sharing(1.0, 0.1, 20.0)).start.tolist() == [0, *[128] * 4]
