"""Cases of the gated activation."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, normal


def run(kernels: Kernels, gate_up: Tensor) -> Results:
    return (kernels.swiglu(gate_up),)


def expected(gate_up: Tensor) -> Results:
    gate, up = gate_up.double().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up,)


def _case(name: str, tokens: int, width: int, scale: float = 1.0) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return (normal((tokens, 2 * width), dtype, 1, scale),)

    return Case(name, make, elements=3 * tokens * width, operations=5 * tokens * width)


OP = Op(
    name="swiglu",
    run=run,
    expected=expected,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2},
    cases=(
        _case("one token", 1, 1536),
        _case("odd width", 13, 37),
        _case("far from zero", 5, 64, scale=60.0),
        Case("strided", lambda dtype: (normal((9, 3 * 40), dtype, 2)[:, 7:87],)),
        _case("a step", 2048, 1536),
    ),
)
