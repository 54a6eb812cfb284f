"""Cases of rotary encoding."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, normal


def run(kernels: Kernels, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Results:
    return kernels.rotary(query, key, cos, sin)


def expected(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Results:
    """Each pair as a complex number times cos + i sin."""
    half = cos.shape[-1]
    turn = torch.complex(cos.to(query.dtype).double(), sin.to(query.dtype).double()).unsqueeze(1)
    out = []
    for tensor in (query, key):
        wide = tensor.double()
        pairs = torch.complex(wide[..., :half].contiguous(), wide[..., half : 2 * half].contiguous()) * turn
        out.append(torch.cat([pairs.real, pairs.imag, wide[..., 2 * half :]], -1))
    return tuple(out)


def _case(name: str, tokens: int, heads: int, kv_heads: int, width: int, half: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        packed = normal((tokens, (heads + 2 * kv_heads) * width), dtype, 1)  # as a joint projection leaves them
        query = packed[:, : heads * width].view(tokens, heads, width)
        key = packed[:, heads * width : (heads + kv_heads) * width].view(tokens, kv_heads, width)
        angle = normal((tokens, half), torch.float32, 2, 3.0)
        return query, key, angle.cos(), angle.sin()

    numbers = tokens * (heads + kv_heads) * width
    return Case(name, make, elements=2 * numbers, operations=3 * numbers)


OP = Op(
    name="rotary",
    run=run,
    expected=expected,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1.2e-2},
    cases=(
        _case("one token", 1, 9, 3, 64, 32),
        _case("odd counts", 37, 7, 1, 20, 10),
        _case("half of the head turns", 11, 4, 2, 64, 16),
        _case("a step", 2048, 9, 3, 64, 32),
    ),
)
