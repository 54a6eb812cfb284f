import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.plan import plan, plan_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=30)


def count_trie_nodes(prompts: list[list[int]]) -> int:
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


def common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@given(PROMPTS)
def test_order_is_lexicographic_and_stable(prompts: list[list[int]]) -> None:
    assert plan(prompts).order.tolist() == sorted(range(len(prompts)), key=lambda index: prompts[index])


@given(PROMPTS)
def test_common_prefixes_and_distinct_tokens_are_exact(prompts: list[list[int]]) -> None:
    result = plan(prompts)
    ordered = [prompts[index] for index in result.order]
    assert result.common.tolist() == [0, *map(common_prefix, ordered, ordered[1:])][: len(prompts)]
    assert result.distinct_tokens == count_trie_nodes(prompts)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 2**32 - 2), min_size=290, max_size=600),
    st.lists(st.tuples(st.integers(0, 600), st.lists(st.integers(0, 2**32 - 2), max_size=5)), max_size=20),
)
def test_long_shared_prefixes(shared: list[int], branches: list[tuple[int, list[int]]]) -> None:
    prompts = [shared[:length] + tail for length, tail in branches]
    result = plan(prompts)
    assert [prompts[index] for index in result.order] == sorted(prompts)
    assert result.distinct_tokens == count_trie_nodes(prompts)


def test_equal_prompts_are_adjacent_in_input_order() -> None:
    result = plan([[5, 6], [1], [5, 6], [1], [5, 6]])
    assert result.order.tolist() == [1, 3, 0, 2, 4]
    assert result.common.tolist() == [0, 1, 0, 2, 2]
    assert result.distinct_tokens == 3


def test_nothing_and_empty_prompts() -> None:
    assert plan([]).order.tolist() == []
    assert plan([[], []]).distinct_tokens == 0


def test_a_hundred_thousand_grouped_prompts() -> None:
    random = np.random.default_rng(0)
    heads = [random.integers(0, 50_000, 30).tolist() for _ in range(50)]
    prompts = [heads[index % 50] + random.integers(0, 50_000, 10).tolist() for index in range(100_000)]
    result = plan(prompts)
    distinct = 50 * 30 + 100_000 * 10
    assert 0.99 * distinct < result.distinct_tokens <= distinct


def test_stored_tokens_give_the_same_plan() -> None:
    prompts = [[3, 1], [3], [2, 9, 9]]
    offsets = np.array([0, 2, 3, 6])
    stored = plan_tokens(np.array([3, 1, 3, 2, 9, 9], np.uint32), offsets)
    assert stored.order.tolist() == plan(prompts).order.tolist() == [2, 1, 0]


def test_comparing_long_prefixes_needs_little_memory() -> None:
    """20,000 prompts with 400 tokens in common: what is compared at once is bounded, not one piece per prompt."""
    rows, length = 20_000, 420
    tokens = np.tile(np.arange(length, dtype=np.uint32), rows)
    tokens[length - 1 :: length] = np.arange(rows)
    offsets = np.arange(rows + 1, dtype=np.int64) * length
    tracemalloc.start()
    result = plan_tokens(tokens, offsets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.distinct_tokens == length - 1 + rows
    assert peak < 30e6
