"""Attention beyond the cases: random steps, the layout's promises, and mutations that the oracle must notice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_steps import steps
from backends import REFERENCE, each_backend
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.kernels import Kernels
from batchgen.kernels.attention import AttentionItems, Masking, cases, layout
from batchgen.kernels.attention.case_steps import Step
from batchgen.kernels.attention.cases import Shape
from batchgen.kernels.attention.layout import Geometry, make_batches
from batchgen.kernels.case import error
from batchgen.kernels.kv_format.cases import plain_pages

shapes = st.builds(
    lambda kv_heads, group, *others: Shape(kv_heads * group, kv_heads, *others),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([8, 20, 33]),
    st.sampled_from([None, None, 1, 5, 40]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([None, None, -1.0, 5.0]),
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that short sequences are cut into many tiles."""
    for name, value in {"QUERY_TILE": 4, "SCORE_BUDGET": 900, "KEY_BUDGET": 2000}.items():
        monkeypatch.setattr(layout, name, value)


def check(kernels: Kernels, step: Step, shape: Shape, dtype: torch.dtype) -> None:
    arguments = cases.make(step, shape, dtype)
    assert error(cases.run(kernels, *arguments)[0], cases.expected(*arguments)[0]) <= cases.OP.tolerance[dtype]


@each_backend
@settings(max_examples=40, deadline=None)
@given(step=steps(), shape=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@example(  # 16 keys whose first and last lie 15 slots apart, with others' between
    step=Step(8, 0, [8, 0], [41, 8], [[0], [0]], [48]), shape=Shape(1, 1, 8, window=40), dtype=torch.float32
)
def test_random_steps(kernels: Kernels, step: Step, shape: Shape, dtype: torch.dtype) -> None:
    check(kernels, step, shape, dtype)


def test_random_steps_in_small_tiles(small_tiles: None) -> None:
    @settings(max_examples=60, deadline=None)
    @given(step=steps(), shape=shapes, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def run(step: Step, shape: Shape, dtype: torch.dtype) -> None:
        check(REFERENCE, step, shape, dtype)

    run()


def seen_pairs(items: AttentionItems, geometry: Geometry) -> np.ndarray:
    """How often the batches show a slot to a query: [T, slots]."""
    size = geometry.block_size
    times = np.zeros((len(items.positions), (items.blocks.max() + 1) * size), dtype=int)
    for batch in make_batches(items, geometry):
        slots = (batch.blocks[..., None] * size + np.arange(size)).reshape(len(batch.blocks), 1, -1)
        shown = np.broadcast_to(batch.present[..., None], (*batch.queries.shape, slots.shape[-1])).copy()
        if batch.hidden is not None:
            shown &= ~batch.hidden
        np.add.at(times, (batch.queries[..., None], slots), shown)
    return times


def test_every_visible_pair_is_in_one_tile(small_tiles: None) -> None:
    @settings(max_examples=80, deadline=None)
    @given(step=steps(), window=st.sampled_from([None, 1, 5, 40]))
    def run(step: Step, window: int | None) -> None:
        items, _ = step.build()
        times = seen_pairs(items, Geometry(2, 1, 8, step.block_size, window))
        expected = np.zeros_like(times)
        for row, slots in enumerate(cases.visible_slots(items, step.block_size, window)):
            expected[row, slots.numpy()] += 1
        np.testing.assert_array_equal(times, expected)

    run()


STEPS = [(case.name, case.make(torch.float32)) for case in cases.STEPS.cases]


@pytest.mark.parametrize("name", [name for name, _ in STEPS])
@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (8, 8)])
def test_batches_of_typical_steps_are_bounded_and_full(name: str, heads: tuple[int, int]) -> None:
    _, keys, _, items, _ = dict(STEPS)[name]
    geometry = Geometry(*heads, 64, keys.shape[2], None)
    batches = make_batches(items, geometry)
    sizes = [batch.queries.size * batch.blocks.shape[1] * geometry.block_size for batch in batches]
    for batch, size in zip(batches, sizes, strict=True):
        assert len(batch.queries) == 1 or size * geometry.num_heads <= layout.SCORE_BUDGET
    padded = sum(batch.queries.size - int(batch.present.sum()) for batch in batches)
    assert padded <= 0.05 * sum(batch.queries.size for batch in batches)
    visible = sum(len(slots) for slots in cases.visible_slots(items, geometry.block_size, None))
    assert sum(sizes) <= 1.25 * visible


def test_the_plan_is_laid_out_once_per_kind_of_layer() -> None:
    query, keys, values, items, _ = cases.make(cases.branching(16), Shape(4, 2, 16), torch.float32)
    plan = REFERENCE.plan_attention(items, 16)
    for window in (None, 40, None, 40):
        REFERENCE.attention(query, plain_pages(keys, values), plan, Masking(0.25, window))
    assert len(plan.layouts) == 2


@each_backend
def test_no_queries_give_no_rows(kernels: Kernels) -> None:
    items, _ = Step(16).build()
    pages = torch.zeros(1, 3, 16, 8)
    out = kernels.attention(
        torch.zeros(0, 2, 8), plain_pages(pages, pages), kernels.plan_attention(items, 16), Masking(1.0)
    )
    assert out.shape == (0, 2, 8)


@each_backend
def test_a_query_without_keys_is_refused(kernels: Kernels) -> None:
    step = cases.prefill(0, 3)
    step.feed(5, 1)
    with pytest.raises(ValueError, match="query 3 of the step sees no keys"):
        cases.run(kernels, *cases.make(step, Shape(), torch.float32))


@each_backend
def test_pages_of_another_dtype_are_converted(kernels: Kernels) -> None:
    query, keys, values, items, masking = cases.make(cases.branching(8), Shape(4, 2, 16), torch.bfloat16)
    wide = (query.float(), keys.float(), values.float(), items, masking)
    assert torch.equal(cases.run(kernels, query.float(), keys, values, items, masking)[0], cases.run(kernels, *wide)[0])


@each_backend
def test_low_precision_scores_keep_their_digits(kernels: Kernels) -> None:
    """Scores of some 200 that differ by less than bfloat16's step there; rounded ones would be off by a factor."""
    step, shape = cases.prefill(60, 1), Shape(3, 1, 64)
    query, keys, values, items, masking = cases.make(step, shape, torch.bfloat16)
    steep = (query * 8, keys, values, items, replace(masking, scale=1.0))
    assert error(cases.run(kernels, *steep)[0], cases.expected(*steep)[0]) <= cases.OP.tolerance[torch.bfloat16]


@each_backend
def test_a_broken_row_leaves_its_neighbours_alone(kernels: Kernels) -> None:
    """NaN in a row's query and own keys: every other row of the step is what it was, bit for bit."""
    query, keys, values, items, masking = cases.make(cases.decode_shared(96, 30), Shape(), torch.float32)
    whole = cases.run(kernels, query, keys, values, items, masking)[0]
    query[7] = torch.nan
    for pages in (keys, values):
        pages.view(pages.shape[0], -1, pages.shape[-1])[:, cases.key_slots(items, 7, keys.shape[2])] = torch.nan
    broken = cases.run(kernels, query, keys, values, items, masking)[0]
    assert broken[7].isnan().all()
    others = torch.arange(len(query)) != 7
    assert torch.equal(broken[others], whole[others])


SUNK_STEPS = {
    "few lanes": cases.decode(2, 40),
    "many lanes": cases.prefill(30, 70),
    "shared": cases.decode_shared(96, 9),
    "long": cases.decode(1, 1100),
}


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUNK_STEPS)
def test_a_very_low_sink_takes_nothing_and_a_very_high_one_all(kernels: Kernels, name: str, dtype: torch.dtype) -> None:
    *arguments, masking = cases.make(SUNK_STEPS[name], Shape(8, 2, 40), dtype)
    without = cases.run(kernels, *arguments, masking)[0]
    for lowest in (-torch.inf, -1e4):
        low = replace(masking, sinks=torch.full((8,), lowest))
        assert torch.equal(cases.run(kernels, *arguments, low)[0], without)
    one = torch.full((8,), -1e4)
    one[5] = 1e4
    out = cases.run(kernels, *arguments, replace(masking, sinks=one))[0]
    assert not out[:, 5].any()
    others = torch.arange(8) != 5
    assert torch.equal(out[:, others], without[:, others])


def test_pages_to_time_stay_on_their_device() -> None:
    assert cases.as_stored(torch.empty(2, 3, 16, 8, device="meta")).device.type == "meta"


MUTATIONS = {
    "no causal mask": lambda items, masking: (
        replace(items, positions=items.positions + 1000),
        replace(masking, window=masking.window + 1000),
    ),
    "queries one position early": lambda items, masking: (
        replace(items, positions=np.maximum(items.positions - 1, 0)),
        masking,
    ),
    "queries one position late": lambda items, masking: (replace(items, positions=items.positions + 1), masking),
    "keys one block late": lambda items, masking: (replace(items, start=items.start + 16), masking),
    "blocks in another order": lambda items, masking: (replace(items, blocks=np.roll(items.blocks, 1)), masking),
    "one key less": lambda items, masking: (replace(items, length=items.length - 1), masking),
    "no window": lambda items, masking: (items, replace(masking, window=None)),
    "window one key wider": lambda items, masking: (items, replace(masking, window=masking.window + 1)),
    "no softcap": lambda items, masking: (items, replace(masking, softcap=None)),
    "no sinks": lambda items, masking: (items, replace(masking, sinks=None)),
    "sinks of the next head": lambda items, masking: (items, replace(masking, sinks=masking.sinks.roll(1))),
    "scaled sinks": lambda items, masking: (items, replace(masking, sinks=masking.sinks * masking.scale)),
    "another scale": lambda items, masking: (items, replace(masking, scale=masking.scale * 1.1)),
}


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_oracle_notices(kernels: Kernels, mutation: str, dtype: torch.dtype) -> None:
    query, keys, values, items, masking = cases.make(
        cases.prefill(7, 40), Shape(4, 2, 32, window=25, softcap=3.0, sinks=3.0), dtype
    )
    keys, values = keys.nan_to_num(nan=3.0), values.nan_to_num(nan=3.0)
    expected = cases.expected(query, keys, values, items, masking)[0]
    assert error(cases.run(kernels, query, keys, values, items, masking)[0], expected) <= cases.OP.tolerance[dtype]
    mutated = MUTATIONS[mutation](items, masking)
    assert error(cases.run(kernels, query, keys, values, *mutated)[0], expected) > 2 * cases.OP.tolerance[dtype]
