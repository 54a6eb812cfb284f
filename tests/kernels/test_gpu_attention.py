"""The GPU's attention beyond its cases: what tasks cover, what a captured graph relies on, what the compiler makes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_steps import steps
from backends import REFERENCE
from compiled import CAPABILITIES, OF_WORKSTATIONS, SHARED_LIMIT, compile_launch, empty
from compiled import empty_pages as pages
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import plan

from batchgen.kernels.attention import AttentionItems, Masking, cases, gpu, gpu_cases
from batchgen.kernels.attention.case_steps import Step
from batchgen.kernels.attention.gpu_choice import Tile, TileKey, Tiles
from batchgen.kernels.attention.gpu_tasks import Geometry, Sizes, Tasks, make_tasks, round_up
from batchgen.kernels.case import Case, error
from batchgen.kernels.chip import Chip
from batchgen.kernels.kv_format import LayerPages
from batchgen.kernels.kv_format.cases import plain_pages
from batchgen.kernels.launch import Launch

LLAMA = Geometry(num_heads=32, num_kv_heads=8, block_size=16, processors=132, wide_rows=128)


LAYER = (32, LayerPages(pages("bfloat16", 8, 128), pages("bfloat16", 8, 128)), torch.bfloat16)


def test_every_small_case_is_interpreted() -> None:
    assert {case.name for case in gpu_cases.SMALL.cases} <= {case for op, case, *_ in plan() if op == "attention"}


@pytest.mark.parametrize("case", [case for case in gpu_cases.SMALL.cases if case.path], ids=lambda case: case.name)
def test_path(case: Case) -> None:
    assert gpu_cases.path(*case.make(torch.bfloat16)) == case.path


LARGE = gpu_cases.large_op(scale=32)


@pytest.mark.parametrize("case", LARGE.cases, ids=lambda case: case.name)
def test_cases_for_devices_are_what_they_say(case: Case) -> None:
    """A thirty-second of every large case, on the reference."""
    arguments = case.make(torch.bfloat16)
    (result,), (expected,) = LARGE.run(REFERENCE, *arguments), LARGE.expected(*arguments)
    assert error(result, expected) <= LARGE.tolerance[torch.bfloat16]


def pairs(items: AttentionItems) -> list[tuple[int, int, int]]:
    """(query, slot of a block, position) of all that is to be attended, item by item, causal limits aside."""
    found = []
    for item in range(len(items.start)):
        rows = items.queries[items.query_offset[item] : items.query_offset[item + 1]]
        blocks = items.blocks[items.block_offset[item] : items.block_offset[item + 1]]
        for row in rows:
            for key in range(items.length[item]):
                if items.start[item] + key <= items.positions[row]:
                    found.append((int(row), int(blocks[key // 16]) * 16 + key % 16, int(items.start[item] + key)))
    return sorted(found)


def covered(tasks: Tasks, items: AttentionItems) -> list[tuple[int, int, int]]:
    """The same, of the tasks."""
    narrow, wide, _, rows, positions, _, blocks = tasks.parts
    found = []
    for first, count, block, keys, position in np.concatenate([narrow, wide]).tolist():
        for entry in range(first, first + count):
            assert positions[entry] == items.positions[rows[entry]]
            for key in range(keys):
                if position + key <= positions[entry]:
                    found.append((int(rows[entry]), int(blocks[block + key // 16]) * 16 + key % 16, position + key))
    return sorted(found)


@settings(max_examples=40, deadline=None)
@given(
    step=steps().filter(lambda step: step.block_size == 16),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    processors=st.sampled_from([1, 8, 132]),
)
def test_tasks_cover_every_visible_key_of_every_query_once(step: Step, group: int, processors: int) -> None:
    items, _ = step.build()
    tasks = make_tasks(items, Geometry(2 * group, 2, 16, processors, 128))
    assert covered(tasks, items) == pairs(items)


@settings(max_examples=40, deadline=None)
@given(step=steps(), group=st.sampled_from([1, 4, 7]))
def test_partial_results_of_a_query_stand_together(step: Step, group: int) -> None:
    items, _ = step.build()
    tasks = make_tasks(items, Geometry(group, 1, step.block_size, 132, 32))
    _, _, merges, rows, _, places, _ = tasks.parts
    assert tasks.sizes.partials == (places >= 0).sum()
    for row, first, count in merges.tolist():
        assert count > 1
        assert sorted(places[rows == row]) == list(range(first, first + count))
    alone = np.setdiff1d(rows, merges[:, 0])
    assert (places[np.isin(rows, alone)] == -1).all()


def test_long_keys_are_cut_so_that_the_device_is_full() -> None:
    alone = make_tasks(cases.decode(1, 32768).build()[0], LLAMA)
    assert alone.sizes.narrow == 98  # 6 x 132 programs of 8 heads, blocks whole
    longest = alone.parts[0][:, 3].max()
    assert longest <= 1.1 * 32768 / 98
    assert make_tasks(cases.decode(512, 1024).build()[0], LLAMA).sizes.narrow == 512
    prompt = make_tasks(cases.prefill(0, 2048).build()[0], LLAMA)
    assert prompt.sizes.narrow == 0
    assert prompt.parts[1][:, 3].max() <= 1.5 * 1024.5 * 64 / (3 * 132 / 8)
    assert (np.diff(prompt.parts[1][:, 3]) <= 0).all(), "dearest first"


def test_a_query_without_keys_is_told() -> None:
    items, _ = cases.decode(3, 20).build()
    nowhere = replace(items, positions=np.append(items.positions, 5))
    with pytest.raises(ValueError, match="query 3 of the step sees no keys"):
        make_tasks(nowhere, LLAMA)


@given(count=st.integers(0, 10**6))
def test_sizes_are_rounded_up_by_a_quarter_at_most(count: int) -> None:
    assert count <= round_up(count) <= max(count * 1.25, count)
    assert round_up(round_up(count)) == round_up(count)


def test_a_layout_is_refilled_in_place() -> None:
    """What a captured graph reads afterwards is what a new layout of its sizes would hold."""
    held = gpu.plan_attention(cases.decode_shared(320, 60).build()[0], 16, Tiles(Chip(), {})).layout(*LAYER)
    other = gpu.plan_attention(cases.decode_shared(256, 55).build()[0], 16, Tiles(Chip(), {})).layout(*LAYER)
    table = held.table(torch.device("cpu"))
    address, sizes = table.data_ptr(), held.sizes
    held.refill(other)
    assert held.table(torch.device("cpu")).data_ptr() == address
    assert held.sizes == sizes
    assert np.array_equal(table.numpy(), other.tasks.table(sizes))


def test_a_step_that_does_not_fit_is_refused() -> None:
    held = gpu.plan_attention(cases.decode(8, 100).build()[0], 16, Tiles(Chip(), {})).layout(*LAYER)
    held.table(torch.device("cpu"))
    for step in (cases.decode(9, 100), cases.decode(8, 300), cases.prefill(0, 40), cases.decode_shared(64, 8)):
        with pytest.raises(ValueError, match="does not fit"):
            held.refill(gpu.plan_attention(step.build()[0], 16, Tiles(Chip(), {})).layout(*LAYER))


def test_tables_of_one_size_lay_out_alike() -> None:
    sizes = Sizes(narrow=3, wide=1, merges=2, partials=7, entries=9, blocks=5)
    assert sizes.offsets() == (0, 16, 24, 32, 44, 56, 68, 76)


def launched(
    format: str,
    capability: int,
    head_dim: int = 128,
    masking: Masking | None = None,
    heads: tuple[int, int] = (32, 8),
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Launch]:
    """The launches of a layer for a step that has tasks of every kind."""
    num_heads, num_kv_heads = heads
    query = empty(64, num_heads, head_dim, dtype=dtype)
    stored = LayerPages(pages(format, num_kv_heads, head_dim), pages(format, num_kv_heads, head_dim))
    chip = Chip((capability // 10, capability % 10))
    plan = gpu.plan_attention(cases.decode_shared(2000, 64).build()[0], 16, Tiles(chip, {}))
    layout = plan.layout(num_heads, stored, query.dtype)
    sums = empty(layout.sizes.partials, num_heads, dtype=torch.float32)
    table = empty(layout.sizes.offsets()[-1], dtype=torch.int32)
    masking = masking or Masking(head_dim**-0.5)
    made = gpu.launches(query, query, query, sums, stored, layout, table, masking, Tiles(chip, {}))
    return dict(zip((gpu_cases.NARROW, gpu_cases.WIDE, gpu_cases.MERGE), made, strict=True))


def test_a_tile_that_was_tuned_is_taken() -> None:
    tuned, key = Tile(32, 8, 4), TileKey("fp8", "bfloat16", "bfloat16", 128, True)
    stored = LayerPages(pages("fp8", 8, 128), pages("bfloat16", 8, 128))
    tiles = Tiles(Chip(), {key: tuned})
    assert tiles.choose(stored, torch.bfloat16, True) == tuned
    for other, dtype, wide in (
        (stored, torch.bfloat16, False),
        (stored, torch.float16, True),
        (LAYER[1], LAYER[2], True),
    ):
        assert tiles.choose(other, dtype, wide) != tuned
    plan = gpu.plan_attention(cases.prefill(0, 64).build()[0], 16, tiles)
    query, layout = empty(64, 32, 128, dtype=torch.bfloat16), plan.layout(32, stored, torch.bfloat16)
    table = empty(layout.sizes.offsets()[-1], dtype=torch.int32)
    (launch,) = gpu.launches(query, query, query, query, stored, layout, table, Masking(1.0), tiles)
    assert (launch.constants["V"].keys, launch.num_warps, launch.num_stages) == (32, 8, 4)


def check(launch: Launch, capability: int, wide: bool) -> None:
    program = compile_launch(launch, capability)
    assert program.stack == 0
    assert program.shared <= SHARED_LIMIT[capability]
    assert program.registers * 32 * launch.num_warps <= 65536
    if wide:
        assert program.matrix_instructions()
    else:
        assert program.matrix_instructions(80)
        assert not program.byte_loads()
    assert program.wide_loads() >= 8


@pytest.mark.parametrize("capability", OF_WORKSTATIONS)
@pytest.mark.parametrize(("format", "head_dim"), [("bfloat16", 128), ("fp8", 128), ("int8", 128), ("bfloat16", 256)])
def test_chips_of_workstations_have_room(format: str, head_dim: int, capability: int) -> None:
    made = launched(format, capability, head_dim)
    check(made[gpu_cases.NARROW], capability, wide=False)
    check(made[gpu_cases.WIDE], capability, wide=True)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("format", ["bfloat16", "fp8", "int8", "int4"])
def test_an_8b_model_compiles_to_matrix_instructions(format: str, capability: int) -> None:
    made = launched(format, capability)
    check(made[gpu_cases.NARROW], capability, wide=False)
    check(made[gpu_cases.WIDE], capability, wide=True)
    assert compile_launch(made[gpu_cases.MERGE], capability).stack == 0


@pytest.mark.parametrize("capability", [*CAPABILITIES, *OF_WORKSTATIONS])
def test_sinks_spill_nothing(capability: int) -> None:
    made = launched("bfloat16", capability, masking=Masking(0.1, sinks=empty(32, dtype=torch.float32)))
    check(made[gpu_cases.NARROW], capability, wide=False)
    check(made[gpu_cases.WIDE], capability, wide=True)
    assert compile_launch(made[gpu_cases.MERGE], capability).stack == 0


OTHERS = {  # format, head width, dtype of the queries
    "float32": ("float32", 128, torch.float32),
    "float32, narrow heads": ("float32", 64, torch.float32),
    "bfloat16, narrow heads": ("bfloat16", 64, torch.bfloat16),
    "int4, narrow heads": ("int4", 64, torch.bfloat16),
    "fp8 under float16": ("fp8", 128, torch.float16),
    "int8 under float16": ("int8", 128, torch.float16),
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_types_and_widths_spill_nothing(name: str, capability: int) -> None:
    format, head_dim, dtype = OTHERS[name]
    made = launched(format, capability, head_dim, dtype=dtype)
    check(made[gpu_cases.NARROW], capability, wide=False)
    check(
        made[gpu_cases.WIDE], capability, wide=dtype != torch.float32
    )  # three products of tf32, of older instructions


def test_blocks_that_lie_apart_are_refused() -> None:
    """As the host keeps them."""
    query, keys, values, items, masking = cases.make(cases.decode(2, 20), cases.Shape(4, 2, 16), torch.bfloat16)
    sides = [torch.stack([side.transpose(0, 1)] * 2, 1)[:, 0].transpose(0, 1) for side in (keys, values)]
    step = gpu.plan_attention(items, 16, Tiles(Chip(), {}))
    with pytest.raises(ValueError, match="side by side"):
        gpu.attention(query, plain_pages(*sides), step, masking)
