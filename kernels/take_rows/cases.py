"""Cases of taking rows of a table."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, generator, normal


def run(kernels: Kernels, table: Tensor, index: Tensor) -> Results:
    return (kernels.take_rows(table, index),)


def expected(table: Tensor, index: Tensor) -> Results:
    """Row by row."""
    return (torch.stack([table[int(row)] for row in index]) if len(index) else table[:0],)


def _case(name: str, rows: int, width: int, tokens: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return normal((rows, width), dtype, 1), torch.randint(0, rows, (tokens,), generator=generator(2))

    return Case(name, make, elements=2 * tokens * width)


OP = Op(
    name="take_rows",
    run=run,
    expected=expected,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    cases=(
        _case("none", 5, 8, 0),
        _case("one of one", 1, 3, 1),
        _case("rows more than once", 7, 33, 40),
        _case("residual of a decode step", 250, 576, 250),
    ),
)
