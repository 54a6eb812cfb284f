"""The fused rotary and KV write as compilers make it, for an 8B model and every KV format."""

import pytest
import torch
from compiled import CAPABILITIES, compile_launch
from compiled import empty_pages as pages

from batchgen.kernels.kv_format import LayerPages
from batchgen.kernels.rotate_write import gpu


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("format", ["bfloat16", "fp8", "int8", "int4"])
def test_an_8b_model(format: str, capability: int) -> None:
    joint = torch.empty(512, 48, 128, dtype=torch.bfloat16, device="meta")
    query, key, value = joint.split_with_sizes([32, 8, 8], 1)
    angles = torch.empty(512, 64, device="meta")
    slots = torch.empty(512, dtype=torch.int64, device="meta")
    stored = LayerPages(pages(format, 8, 128), pages(format, 8, 128))
    program = compile_launch(gpu.plan(query, key, value, angles, angles, slots, stored, query), capability)
    assert program.stack == 0
    assert program.wide_loads() >= 4
