"""The quantised products of a GPU beyond their cases: compiled for 8B shapes, and the choice of a way as a function."""

import pytest
import torch
from compiled import CAPABILITIES, OF_WORKSTATIONS, SHARED_LIMIT, compile_launch
from eight_billion import SHAPES, WEIGHTS, choice_of, empty, products, weight
from hypothesis import given
from hypothesis import strategies as st

from batchgen.kernels.chip import Chip
from batchgen.kernels.grouped import activations, dense, gpu, narrow
from batchgen.kernels.grouped.choice import LEAST_STEPS, TABLES, Choice, Choices, Key, bucket, candidates
from batchgen.kernels.launch import Launch
from batchgen.kernels.rounding import E4M3, INT8

CHIPS = {
    80: Chip((8, 0), 108),
    89: Chip((8, 9), 142),
    90: Chip((9, 0), 132),
    100: Chip((10, 0), 148),
    120: Chip((12, 0), 188),
}
H200 = Choices(CHIPS[90], {})
OLDER_INSTRUCTIONS = {("int8, one scale", 100): 80}  # whole numbers go the way of mma.sync there
TARGETS = [
    (name, capability)
    for name in WEIGHTS
    for capability in (*CAPABILITIES, *OF_WORKSTATIONS)
    if CHIPS[capability].has_fp8 or WEIGHTS[name][3] != torch.float8_e4m3fn
]


@pytest.mark.parametrize(("name", "capability"), TARGETS)
def test_products_of_8b_shapes_compile_without_spills(name: str, capability: int) -> None:
    launches = list(products(CHIPS[capability], name))
    assert launches
    for launch in launches:
        program = compile_launch(launch, capability)
        assert program.stack == 0
        assert program.shared <= SHARED_LIMIT[capability]
        assert program.matrix_instructions(OLDER_INSTRUCTIONS.get((name, capability))) > 0
        assert program.wide_loads() > 0
        assert (program.fp8_instructions() > 0) == (WEIGHTS[name][3] == torch.float8_e4m3fn)


LONGEST = 28672  # inputs of a linear of a 70B model


def _other_launches() -> dict[str, Launch]:
    x, out = empty(512, 4096), empty(512, 4096)
    sums, token_scale, scale = empty(512, 128256, dtype=torch.int32), *(empty(512, dtype=torch.float32),) * 2
    whole, floats = empty(512, 4096, dtype=torch.int8), empty(512, 4096, dtype=torch.float8_e4m3fn)
    one, segments = (empty(count, 512, dtype=torch.float32) for count in (1, 32))
    long, codes = empty(512, LONGEST), empty(512, LONGEST, dtype=torch.float8_e4m3fn)
    return {
        "parts": gpu.plan_sum(empty(8, 16, 4096, dtype=torch.float32), out),
        "codes int8": activations.plan_codes(x, whole, one, INT8, 4096),
        "codes e4m3": activations.plan_codes(x, floats, one, E4M3, 4096),
        "codes e4m3 with sums": activations.plan_codes(x, floats, one, E4M3, 4096, segments, 128),
        "codes e4m3 of a 70B model": activations.plan_codes(long, codes, one, E4M3, LONGEST, one, LONGEST),
        "what e4m3 stand for": activations.plan_codes(x, out, one, E4M3, 4096),
        "codes e4m3 of groups": activations.plan_codes(x, floats, segments, E4M3, 128),
        "sums of chains": activations.plan_sums(x, segments, 128),
        "scales": narrow.plan_scales(sums, token_scale, scale, None, empty(512, 128256, dtype=torch.float32)),
        **{
            f"expanded {name}": dense.plan(weight(name, 28672, 4096), empty(28672, 4096))
            for name in ("int4, groups of 32 with a minimum", "int8, groups of 32", "fp8, one scale")
        },
    }


OTHERS = _other_launches()


@pytest.mark.parametrize("capability", [*CAPABILITIES, *OF_WORKSTATIONS])
@pytest.mark.parametrize("name", OTHERS)
def test_what_stands_around_a_product_spills_nothing(name: str, capability: int) -> None:
    if "e4m3" in name and not CHIPS[capability].has_fp8:
        pytest.skip("no such floats")
    program = compile_launch(OTHERS[name], capability)
    assert program.stack == 0
    assert not ("codes" in name and program.fused()), "a code next to a tie would be another than the reference's"


PATHS = {  # of an H200
    ("int4, groups of 128", "output"): ("split 8", "split 8", "split 8", "dense"),
    ("int4, groups of 128", "gate and up"): ("tiles", "tiles", "tiles", "dense"),
    ("int4, groups of 32 with a minimum", "down"): ("split 8", "split 8", "split 4", "dense"),
    ("int4, groups of 128, 8-bit floats", "output"): ("split 8", "split 8", "split 8", "split 2"),
    ("int4, groups of 128, 8-bit floats", "qkv"): ("split 5", "split 5", "split 5", "tiles"),
    ("int4, groups of 128, 8-bit floats", "gate and up"): ("tiles", "tiles", "tiles", "tiles"),
    ("int4, groups of 32 with a minimum, 8-bit floats", "down"): ("split 8", "split 8", "split 8", "split 2"),
    ("int8, one scale", "head"): ("tiles", "tiles", "tiles", "library"),
    ("fp8, one scale", "qkv"): ("split 5", "split 5", "split 5", "library"),
    ("fp8, groups of 128", "gate and up"): ("tiles", "tiles", "tiles", "tiles"),
}


@pytest.mark.parametrize(("name", "shape"), PATHS)
def test_paths_of_an_h200(name: str, shape: str) -> None:
    held = weight(name, *SHAPES[shape])
    choices = [choice_of(H200, name, held, rows) for rows in (1, 16, 64, 256)]
    found = [f"split {choice.splits}" if choice.path == "split" else choice.path for choice in choices]
    assert tuple(found) == PATHS[name, shape]


@given(
    table=st.sampled_from(sorted(TABLES)),
    tokens=st.integers(1, 5000),
    outputs=st.integers(1, 200_000),
    inputs=st.integers(1, 40_000),
    processors=st.integers(1, 200),
)
def test_every_split_has_work(table: str, tokens: int, outputs: int, inputs: int, processors: int) -> None:
    built_in = next(choice for most, choice in TABLES[table] if tokens <= most)
    choice = Choices(Chip((9, 0), processors), {}).shared_out(built_in, tokens, outputs, inputs, 128)
    assert (choice.splits > 1) == (choice.path == "split")
    steps = -(-inputs // 128)
    per_split = -(-steps // choice.splits)
    assert choice.splits == 1 or per_split >= LEAST_STEPS
    assert per_split * (choice.splits - 1) <= steps


def test_what_was_tuned_goes_first() -> None:
    tuned = Choice("tiles", 32, 64, 4, 3)
    choices = Choices(CHIPS[90], {Key("wide", "int4", 128, 256, 4096, 4096): tuned})
    assert bucket(129) == bucket(256) == 256
    held = weight("int4, groups of 128", 4096, 4096)
    assert choices.choose("wide", held, 200) == tuned
    assert choices.choose("wide", held, 257).path == "dense"
    for other in ("int4, groups of 32", "int8, groups of 32", "fp8, one scale, plain activations"):
        assert choices.choose("wide", weight(other, 4096, 4096), 200).path == "dense"


@pytest.mark.parametrize("table", TABLES)
def test_candidates_hold_the_table(table: str) -> None:
    for tokens in (1, 40, 300):
        tried = list(candidates(table, tokens))
        assert next(choice for most, choice in TABLES[table] if tokens <= most) in tried
        assert len(tried) > 4
