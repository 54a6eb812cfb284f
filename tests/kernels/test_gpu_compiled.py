"""The Triton kernels compiled for devices that are not here, in the sizes of an 8B model: nothing spills, all fits."""

import re

import pytest
import torch
from compiled import CAPABILITIES, OF_WORKSTATIONS, SHARED_LIMIT, compile_launch
from gpu_table import PAGE, launches, works

from batchgen.kernels.copy_blocks import gpu as copy_blocks
from batchgen.kernels.grouped import activations, narrow
from batchgen.kernels.launch import Launch
from batchgen.kernels.rms_norm import gpu as rms_norm
from batchgen.kernels.rounding import INT8
from batchgen.kernels.sampling import Filters, Penalties
from batchgen.kernels.sampling import gpu as sampling
from batchgen.kernels.swiglu import gpu as swiglu
from batchgen.kernels.token_mask import gpu as token_mask

each_capability = pytest.mark.parametrize("capability", [*CAPABILITIES, *OF_WORKSTATIONS])


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(add: bool) -> Launch:
    hidden = empty(512, 4096)
    return rms_norm.plan(hidden, hidden, empty(4096), hidden, 1e-5, add=add)


ELEMENTWISE = {
    "rms_norm": _norm(add=False),
    "add_rms_norm": _norm(add=True),
    "swiglu": swiglu.plan(empty(512, 28672), empty(512, 14336)),
    "copy_blocks": copy_blocks.plan(empty(32, 2, 8, 50_001, 16, 128), empty(9, 2, dtype=torch.int64)),
}
ROWS, VOCABULARY = 512, 128256


def floats(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def whole(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def _sampling() -> dict[str, Launch]:
    logits, by_row, tokens = floats(ROWS, VOCABULARY), floats(ROWS), whole(ROWS)
    penalties = Penalties(whole(99), whole(99), floats(99), by_row, by_row, by_row)
    launches = [
        *sampling.plan_sample(logits, Filters(by_row, tokens, by_row, by_row, whole(ROWS, 2)), tokens),
        *sampling.plan_logprobs(logits, tokens, by_row, floats(ROWS, 5), whole(ROWS, 5))[1:],
        sampling.plan_finite(logits, empty(ROWS, dtype=torch.bool)),
        sampling.plan_penalties(logits, penalties),
        token_mask.plan(logits, tokens, empty(ROWS, VOCABULARY // 32, dtype=torch.int32)),
    ]
    return {launch.kernel.fn.__name__: launch for launch in launches}


SAMPLING = _sampling()
MANY, MOST_DOWN = 100_000, 65_535  # rows; programs in the second and third direction of a grid, by CUDA's limit


def _many_rows() -> dict[str, Launch]:
    hidden, by_token = empty(MANY, 256), floats(2, MANY)
    codes, sums = empty(MANY, 256, dtype=torch.int8), empty(MANY, 256, dtype=torch.int32)
    return {
        "rms_norm": rms_norm.plan(hidden, hidden, empty(256), hidden, 1e-5, add=True),
        "swiglu": swiglu.plan(empty(MANY, 512), hidden),
        "codes": activations.plan_codes(hidden, codes, by_token, INT8, 128),
        "sums of chains": activations.plan_sums(hidden, by_token, 128),
        "scales": narrow.plan_scales(sums, floats(MANY), floats(256), None, hidden),
        "mask": token_mask.plan(floats(MANY, 256), whole(MANY), empty(MANY, 8, dtype=torch.int32)),
    }


@pytest.mark.parametrize(("name", "launch"), _many_rows().items())
def test_a_grid_holds_any_number_of_rows(name: str, launch: Launch) -> None:
    assert launch.grid[0] >= MANY
    assert all(count <= MOST_DOWN for count in launch.grid[1:]), name


def test_draws_are_compiled_once_for_any_number_of_rows() -> None:
    """Addresses that are multiples of 16 bytes for some numbers of rows alone would have them compiled anew."""
    kinds = set()
    for rows in range(1, 9):
        logits, by_row, tokens = torch.zeros(rows, 64), torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
        drawn = Filters(by_row, tokens, by_row, by_row, torch.zeros(rows, 2, dtype=torch.int64))
        ranked = (logits, tokens, by_row, torch.zeros(rows, 3), torch.zeros(rows, 3, dtype=torch.int64))
        for launch in (*sampling.plan_sample(logits, drawn, tokens), *sampling.plan_logprobs(*ranked)):
            tensors = [part for part in launch.arguments if isinstance(part, torch.Tensor)]
            kinds.add((launch.kernel.fn.__name__, tuple(part.data_ptr() % 16 for part in tensors)))
    assert len(kinds) == len({name for name, _ in kinds})


WHOLE_ROWS = {"draw_from_all", "gather_candidates", "check_finite"}


@each_capability
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_are_read_many_bytes_a_thread(name: str, capability: int) -> None:
    program = compile_launch(ELEMENTWISE[name], capability)
    assert program.stack == 0
    assert program.shared <= SHARED_LIMIT[capability]
    assert program.wide_loads() >= 2


@each_capability
@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_spills_nothing(name: str, capability: int) -> None:
    program = compile_launch(SAMPLING[name], capability)
    assert program.stack == 0
    assert program.shared <= SHARED_LIMIT[capability]
    assert name not in WHOLE_ROWS or program.wide_loads() > 0


CASES, KERNELS = PAGE.read_text(encoding="utf-8").split("## What compilers make of them")


def test_the_page_of_kernels_has_what_every_case_moves_and_computes() -> None:
    rows = [line for line in CASES.splitlines() if line.startswith("| ")]
    assert rows[1:] == [work.row() for work in works()]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_page_of_kernels_says_what_was_made_of_each(capability: int) -> None:
    """Figures change with the compiler, kernels do not."""
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in KERNELS.splitlines() if "KiB" in line and line.startswith("| ")]
    column = 1 + CAPABILITIES.index(capability)
    made = {row[0]: row[column] for row in rows if row[column]}
    assert set(made) == {name for name, _ in launches(capability)}
    assert all(re.fullmatch(r"\d+, \d+ KiB, \d+, [1-9]\d*", cell) for cell in made.values())
