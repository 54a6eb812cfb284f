"""Cases of draws from a linear. The truth is that of sampling, over the logits that the table's own linear gives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, normal
from ..linear_fp8.cases import make_weight as fp8_weight
from ..linear_int4.cases import make_weight as int4_weight
from ..linear_int8.cases import BALANCED
from ..linear_int8.cases import make_weight as int8_weight
from ..panels.cases import Form
from ..sampling import Filters
from ..sampling.cases import expected_finite, expected_sample, filters
from . import DrawnLinear

MakeHead = Callable[[Kernels, int, int, int, torch.dtype], DrawnLinear]  # outputs, inputs, vocabulary, dtype of x


def twice(values: Tensor) -> Tensor:
    """The rows of a weight, an even number, with the first half in place of the second: logits that are equal."""
    return values[: len(values) // 2].repeat(2, 1)


def dense(kernels: Kernels, outputs: int, inputs: int, vocabulary: int, dtype: torch.dtype) -> DrawnLinear:
    packed = kernels.pack_dense(twice(normal((outputs, inputs), dtype, 2, inputs**-0.5)), None)
    return DrawnLinear(lambda x: kernels.linear(x, packed), packed, None, dtype, vocabulary)


def int8(kernels: Kernels, outputs: int, inputs: int, vocabulary: int, dtype: torch.dtype) -> DrawnLinear:
    weight = int8_weight(outputs, inputs, BALANCED)
    packed = kernels.pack_int8(replace(weight, q=twice(weight.q), scale=twice(weight.scale)))
    return DrawnLinear(
        lambda x: kernels.linear_int8(x, packed, None, torch.float32), packed, None, torch.float32, vocabulary
    )


def int4(kernels: Kernels, outputs: int, inputs: int, vocabulary: int, dtype: torch.dtype) -> DrawnLinear:
    packed = kernels.pack_int4(int4_weight(outputs, inputs, Form(32)))
    return _quantised(kernels.linear_int4, packed, outputs, vocabulary)


def fp8(kernels: Kernels, outputs: int, inputs: int, vocabulary: int, dtype: torch.dtype) -> DrawnLinear:
    packed = kernels.pack_fp8(fp8_weight(outputs, inputs, Form(half=False, minimum=False)))
    return _quantised(kernels.linear_fp8, packed, outputs, vocabulary)


def _quantised(op: Callable[..., Tensor], packed: Any, outputs: int, vocabulary: int) -> DrawnLinear:
    """Its bias makes the ids that are not to be drawn the largest."""
    bias = normal((outputs,), torch.float32, 3)
    bias[vocabulary:] = 1e4
    return DrawnLinear(lambda x: op(x, packed, bias, torch.float32), packed, bias, torch.float32, vocabulary)


def logits(kernels: Kernels, make: MakeHead, outputs: int, vocabulary: int, x: Tensor, filters: Filters) -> Tensor:
    """[R, vocabulary] float32, as the table keeps them."""
    return make(kernels, outputs, x.shape[1], vocabulary, x.dtype).product(x).float()[:, :vocabulary]


def run(kernels: Kernels, make: MakeHead, outputs: int, vocabulary: int, x: Tensor, filters: Filters) -> Results:
    return kernels.draw(x, make(kernels, outputs, x.shape[1], vocabulary, x.dtype), filters)


def expected(make: MakeHead, outputs: int, vocabulary: int, x: Tensor, filters: Filters, logits: Tensor) -> Results:
    return *expected_sample(logits, filters), *expected_finite(logits)


def _case(name: str, make: MakeHead, rows: int, outputs: int, vocabulary: int, *temperatures: float) -> Case:
    def arguments(dtype: torch.dtype) -> Arguments:
        return make, outputs, vocabulary, normal((rows, 192), dtype, 1), filters(rows, temperature=list(temperatures))

    return Case(name, arguments)


OP = Op(
    name="draw",
    run=run,
    expected=expected,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    cases=tuple(
        _case(f"{name}, {kind}", make, rows, outputs, vocabulary, *temperatures)
        for kind, make in (("dense", dense), ("int8", int8), ("int4", int4), ("fp8", fp8))
        for name, rows, outputs, vocabulary, temperatures in (
            ("one row", 1, 100, 100, (0.0,)),
            ("greedy, a wider head", 13, 400, 333, (0.0,)),
            ("temperatures", 9, 300, 300, (0.0, 0.3, 1.0, 2.5, 50.0)),
            ("one token", 2, 32, 1, (0.0, 1.0)),
        )
    ),
    rounding=logits,
)
