"""Rounding: the ops round where transformers rounds, so the reference's results are equal bit for bit.

The native kernels add up in another order, and have an exponential of their own: they are off by a step at most.
"""

import pytest
import torch
from backends import NATIVE, REFERENCE, each_backend
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from batchgen.kernels import Kernels
from batchgen.kernels.attention import cases
from batchgen.kernels.case import normal
from batchgen.kernels.kv_format.cases import plain_pages
from batchgen.kernels.rotate_write.cases import no_turn

STEPS = {torch.float32: 5e-7, torch.bfloat16: 1.6e-2}  # two roundings
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(kernels: Kernels, result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    if kernels is REFERENCE:
        assert torch.equal(result, expected)
    torch.testing.assert_close(result, expected, rtol=STEPS[expected.dtype], atol=0)


@each_backend
@DTYPES
@pytest.mark.parametrize("shape", [(250, 576), (7, 9, 64), (1, 33)], ids=str)
def test_rms_norm(kernels: Kernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data = normal(shape[-1:], dtype, 1)
    x = normal(shape, dtype, 2, 5.0)
    check(kernels, kernels.rms_norm(x, norm.weight.data, 1e-5), norm(x))


@each_backend
@DTYPES
def test_a_residual_is_added_before_the_norm(kernels: Kernels, dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data = normal((576,), dtype, 1)
    residual, x = normal((250, 576), dtype, 2, 5.0), normal((250, 576), dtype, 3)
    total = residual + x
    check(kernels, kernels.add_rms_norm(residual, x, norm.weight.data, 1e-5), norm(total))
    assert torch.equal(residual, total)


@each_backend
@DTYPES
def test_rotary(kernels: Kernels, dtype: torch.dtype) -> None:
    query, key = normal((37, 9, 64), dtype, 1), normal((37, 3, 64), dtype, 2)
    angle = normal((37, 32), torch.float32, 3, 4.0)
    cos, sin = (torch.cat([part, part], -1).to(dtype)[None] for part in (angle.cos(), angle.sin()))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    keys, values = torch.zeros(3, 5, 8, 64, dtype=dtype), torch.zeros(3, 5, 8, 64, dtype=dtype)
    rotary, slots, pages = (angle.cos(), angle.sin()), torch.arange(2, 39), plain_pages(keys, values)
    turned = kernels.rotate_write(query, key, key, *rotary, slots, pages)
    assert torch.equal(turned, expected[0][0].transpose(0, 1))
    assert torch.equal(keys.view(3, 40, 64)[:, 2:39], expected[1][0])
    assert torch.equal(values.view(3, 40, 64)[:, 2:39], key.transpose(0, 1))


@each_backend
@DTYPES
def test_swiglu(kernels: Kernels, dtype: torch.dtype) -> None:
    gate_up = normal((37, 2 * 129), dtype, 1, 4.0)
    expected = torch.nn.functional.silu(gate_up[:, :129]) * gate_up[:, 129:]
    check(kernels, kernels.swiglu(gate_up), expected)


@each_backend
def test_keys_and_values_are_rounded_to_the_pages(kernels: Kernels) -> None:
    key, value = normal((5, 2, 8), torch.float32, 1), normal((5, 2, 8), torch.float32, 2)
    pages = [torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    kernels.rotate_write(key, key, value, *no_turn(5, 4), torch.arange(3, 8), plain_pages(*pages))
    for source, stored in zip((key, value), pages, strict=True):
        assert torch.equal(stored.view(2, 12, 8)[:, 3:8], source.transpose(0, 1).bfloat16())


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
def test_half_precision_runs_on_the_reference(kernels: Kernels) -> None:
    """float16, which the libraries do not know, gives what the reference gives."""
    x, weight = normal((5, 64), torch.float16, 1), normal((64,), torch.float16, 2)
    heads, angle = normal((5, 4, 16), torch.float16, 3), normal((5, 8), torch.float32, 4)
    pages = [[torch.zeros(4, 2, 8, 16, dtype=torch.float16) for _ in range(2)] for _ in range(2)]
    step = cases.make(cases.branching(8), cases.Shape(4, 2, 16), torch.float16)
    turned = [
        one.rotate_write(heads, heads, heads, angle, angle, torch.arange(5), plain_pages(*own))
        for one, own in ((kernels, pages[0]), (REFERENCE, pages[1]))
    ]
    assert torch.equal(*turned)
    assert all(torch.equal(a, b) for a, b in zip(*pages, strict=True))
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    residuals = [x.flip(0).clone() for _ in range(2)]
    added = [one.add_rms_norm(own, x, weight, 1e-5) for one, own in zip((kernels, REFERENCE), residuals, strict=True)]
    assert torch.equal(*added)
    assert torch.equal(*residuals)
    assert torch.equal(kernels.swiglu(x), REFERENCE.swiglu(x))
    assert torch.equal(cases.run(kernels, *step)[0], cases.run(REFERENCE, *step)[0])
