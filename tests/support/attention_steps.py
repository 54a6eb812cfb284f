"""Random steps of attention for Hypothesis."""

from itertools import pairwise

from hypothesis import strategies as st

from batchgen.kernels.attention.case_steps import Step


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A prompt trie of two levels cut into items at random blocks; its rows feed one token or many."""
    size = draw(st.sampled_from([8, 16, 32]))
    step = Step(size, seed=draw(st.integers(0, 99)))
    prefix = size * draw(st.integers(0, 4))
    sharing: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        cached, fed = draw(st.integers(0, 50)), draw(st.sampled_from([1, 1, 1, 2, 5, 23]))
        rows = step.feed(prefix + cached, fed)
        sharing += rows
        cut_into_items(draw, step, prefix, cached + fed, rows)
    if prefix:
        cut_into_items(draw, step, 0, prefix, sharing)
    return step


def cut_into_items(draw: st.DrawFn, step: Step, start: int, length: int, rows: list[int]) -> None:
    blocks = -(-length // step.block_size)
    cuts = sorted({0, blocks, *draw(st.lists(st.integers(0, blocks), max_size=2))})
    for first, last in pairwise(cuts):
        begin = first * step.block_size
        step.item(start + begin, min(length, last * step.block_size) - begin, rows)
