"""The Triton kernels compiled for devices that are not here, in the sizes of an 8B model: nothing spills, all fits."""

import pytest
import torch
from compiled import CAPABILITIES, SHARED_LIMIT, compile_launch

from batchgen.kernels.launch import Launch
from batchgen.kernels.rms_norm import gpu as rms_norm
from batchgen.kernels.swiglu import gpu as swiglu
from batchgen.kernels.token_mask import gpu as token_mask

each_capability = pytest.mark.parametrize("capability", CAPABILITIES)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm(add: bool) -> Launch:
    hidden = empty(512, 4096)
    return rms_norm.plan(hidden, hidden, empty(4096), hidden, 1e-5, add=add)


ELEMENTWISE = {
    "rms_norm": _norm(add=False),
    "add_rms_norm": _norm(add=True),
    "swiglu": swiglu.plan(empty(512, 28672), empty(512, 14336)),
}
MASK = token_mask.plan(
    empty(512, 128256, dtype=torch.float32), empty(512, dtype=torch.int64), empty(512, 4008, dtype=torch.int32)
)


@each_capability
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_are_read_many_bytes_a_thread(name: str, capability: int) -> None:
    program = compile_launch(ELEMENTWISE[name], capability)
    assert program.stack == 0
    assert program.shared <= SHARED_LIMIT[capability]
    assert program.wide_loads() >= 2


@each_capability
def test_the_mask_spills_nothing(capability: int) -> None:
    assert compile_launch(MASK, capability).stack == 0
