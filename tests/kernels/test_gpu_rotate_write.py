"""The fused rotary and KV write as compilers make it, for an 8B model and every KV format."""

import pytest
import torch
from compiled import CAPABILITIES, OF_WORKSTATIONS, Program, compile_launch
from compiled import empty_pages as pages

from batchgen.kernels.kv_format import LayerPages
from batchgen.kernels.rotate_write import gpu


@pytest.mark.parametrize("capability", [*CAPABILITIES, *OF_WORKSTATIONS])
@pytest.mark.parametrize("format", ["bfloat16", "fp8", "int8", "int4"])
def test_an_8b_model(format: str, capability: int) -> None:
    program = _compiled(format, capability, torch.bfloat16)
    assert program.stack == 0
    assert program.wide_loads() >= 4


@pytest.mark.parametrize("format", ["float32", "fp8", "int8", "int4"])
def test_every_step_is_rounded_as_in_the_reference(format: str) -> None:
    assert _compiled(format, 90, torch.float32).fused() == 0


def _compiled(format: str, capability: int, dtype: torch.dtype) -> Program:
    joint = torch.empty(512, 48, 128, dtype=dtype, device="meta")
    query, key, value = joint.split_with_sizes([32, 8, 8], 1)
    angles = torch.empty(512, 64, device="meta")
    slots = torch.empty(512, dtype=torch.int64, device="meta")
    stored = LayerPages(pages(format, 8, 128), pages(format, 8, 128))
    return compile_launch(gpu.plan(query, key, value, angles, angles, slots, stored, query), capability)
