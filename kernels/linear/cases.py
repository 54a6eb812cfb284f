"""Cases of the dense linear layer."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, normal


def run(kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Results:
    return (kernels.linear(x, kernels.pack_dense(weight, bias)),)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Results:
    out = torch.einsum("th,oh->to", x.double(), weight.double())
    return (out if bias is None else out + bias.double(),)


def _case(name: str, tokens: int, inputs: int, outputs: int, bias: bool = False) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        weight = normal((outputs, inputs), dtype, 2, inputs**-0.5)
        return normal((tokens, inputs), dtype, 1), weight, normal((outputs,), dtype, 3) if bias else None

    moved = tokens * (inputs + outputs) + inputs * outputs
    return Case(name, make, elements=moved, operations=2 * tokens * inputs * outputs)


OP = Op(
    name="linear",
    run=run,
    expected=expected,
    tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
    cases=(
        _case("one token", 1, 576, 960),
        _case("odd sizes, bias", 13, 37, 51, bias=True),
        _case("gate and up of a decode step", 250, 576, 3072),
        _case("down of a prompt step", 2048, 1536, 576),
    ),
)
