"""Rounding: the ops round where transformers rounds, so results are equal bit for bit."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from batchgen.kernels import load
from batchgen.kernels.case import normal

CPU = load("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("shape", [(250, 576), (7, 9, 64), (1, 33)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data = normal(shape[-1:], dtype, 1)
    x = normal(shape, dtype, 2, 5.0)
    assert torch.equal(CPU.rms_norm(x, norm.weight.data, 1e-5), norm(x))


@DTYPES
def test_rotary(dtype: torch.dtype) -> None:
    query, key = normal((37, 9, 64), dtype, 1), normal((37, 3, 64), dtype, 2)
    angle = normal((37, 32), torch.float32, 3, 4.0)
    cos, sin = (torch.cat([part, part], -1).to(dtype)[None] for part in (angle.cos(), angle.sin()))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for result, other in zip(CPU.rotary(query, key, angle.cos(), angle.sin()), expected, strict=True):
        assert torch.equal(result, other[0].transpose(0, 1))


@DTYPES
def test_swiglu(dtype: torch.dtype) -> None:
    gate_up = normal((37, 2 * 129), dtype, 1, 4.0)
    expected = torch.nn.functional.silu(gate_up[:, :129]) * gate_up[:, 129:]
    assert torch.equal(CPU.swiglu(gate_up), expected)


def test_write_kv_rounds_to_the_pages() -> None:
    key, value = normal((5, 2, 8), torch.float32, 1), normal((5, 2, 8), torch.float32, 2)
    pages = [torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    CPU.write_kv(key, value, torch.arange(3, 8), *pages)
    for source, stored in zip((key, value), pages, strict=True):
        assert torch.equal(stored.view(2, 12, 8)[:, 3:8], source.transpose(0, 1).bfloat16())
