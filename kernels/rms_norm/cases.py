"""Cases of RMS normalisation, alone and with a residual."""

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


def run_added(kernels: Kernels, residual: Tensor, x: Tensor, weight: Tensor) -> Results:
    total = residual.clone()
    return kernels.add_rms_norm(total, x, weight, EPSILON), total


def expected_added(residual: Tensor, x: Tensor, weight: Tensor) -> Results:
    total = (residual.double() + x.double()).to(x.dtype)
    return *expected(total, weight), total.double()


def _case(name: str, *shape: int, scale: float = 1.0) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return normal(shape, dtype, 1, scale), normal(shape[-1:], dtype, 2)

    return Case(name, make, elements=2 * torch.Size(shape).numel(), operations=4 * torch.Size(shape).numel())


def _strided(dtype: torch.dtype) -> Arguments:
    return normal((13, 5, 96), dtype, 3)[:, :3, ::2], normal((48,), dtype, 4)


def _strided_weight(dtype: torch.dtype) -> Arguments:
    return normal((3, 4096), dtype, 6), normal((8192,), dtype, 7)[::2]


def _added(name: str, rows: int, width: int, scale: float = 1.0) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        both = normal((2, rows, width), dtype, 1, scale)
        return both[0], both[1], normal((width,), dtype, 2)

    return Case(name, make, elements=4 * rows * width, operations=5 * rows * width)


def _strided_rows(dtype: torch.dtype) -> Arguments:
    return normal((13, 48), dtype, 3), normal((13, 96), dtype, 4)[:, 7:55], normal((48,), dtype, 5)


def _strided_weight_added(dtype: torch.dtype) -> Arguments:
    x, weight = _strided_weight(dtype)
    return x.flip(0), x, weight


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
        Case("strided weight", _strided_weight),
        _case("a step", 2048, 576),
    ),
)
ADDED_OP = Op(
    name="add_rms_norm",
    run=run_added,
    expected=expected_added,
    tolerance=OP.tolerance,
    cases=(
        _added("one row", 1, 576),
        _added("odd width", 7, 45),
        _added("narrow", 5, 3),
        _added("huge values", 6, 48, scale=1e15),
        Case("strided", _strided_rows),
        Case("strided weight", _strided_weight_added),
        _added("a step", 2048, 576),
    ),
)
