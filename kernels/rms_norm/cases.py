"""Cases of RMS normalisation."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, normal

EPSILON = 1e-5


def run(kernels: Kernels, x: Tensor, weight: Tensor) -> Results:
    return (kernels.rms_norm(x, weight, EPSILON),)


def expected(x: Tensor, weight: Tensor) -> Results:
    wide = x.double()
    return (weight.double() * (wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()),)


def _case(name: str, *shape: int, scale: float = 1.0) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return normal(shape, dtype, 1, scale), normal(shape[-1:], dtype, 2)

    return Case(name, make, elements=2 * torch.Size(shape).numel(), operations=4 * torch.Size(shape).numel())


def _strided(dtype: torch.dtype) -> Arguments:
    return normal((13, 5, 96), dtype, 3)[:, :3, ::2], normal((48,), dtype, 4)


OP = Op(
    name="rms_norm",
    run=run,
    expected=expected,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1e-2},
    cases=(
        _case("one row", 1, 576),
        _case("odd width", 7, 33),
        _case("per head", 19, 5, 64),
        _case("tiny values", 6, 48, scale=1e-4),
        _case("huge values", 6, 48, scale=1e15),
        Case("strided", _strided),
        _case("a step", 2048, 576),
    ),
)
