"""Cases of the 4-bit linear layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import Kernels
from ..case import Op, Results, generator, normal
from ..chip import Chip
from ..grouped import form_of
from ..grouped.choice import Choices, mixed
from ..grouped.layout import INT4, lay_out
from ..panels.cases import Form, common_cases, expected, rounding, scales, speed_cases
from . import Int4Weight


def run(kernels: Kernels, x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Results:
    return (kernels.linear_int4(x, kernels.pack_int4(weight), bias, x.dtype),)


def prepare(kernels: Kernels, x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Callable[[], Any]:
    packed = kernels.pack_int4(weight)
    return lambda: kernels.linear_int4(x, packed, bias, x.dtype)


def make_weight(outputs: int, inputs: int, form: Form) -> Int4Weight:
    scale, group = scales(outputs, inputs, form, 8)
    q = torch.randint(0, 256, (outputs, inputs // 2), generator=generator(4), dtype=torch.uint8)
    around = -8 * scale.float()
    noise = normal(tuple(scale.shape), torch.float32, 6, 0.3 * inputs**-0.5)
    return Int4Weight(q, scale, (around if form.symmetric else around + noise).to(scale.dtype), group)


def path(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> str:
    """The way on an H200."""
    form = form_of(4, weight.group, weight.shape[1])
    assert form is not None
    laid_out = lay_out(INT4, weight.codes(), weight.scale, weight.minimum, weight.group, weight.shape[1], form)
    return mixed(Choices(Chip(), {}), laid_out, len(x)).path


FORMS = (
    ("groups of 32, zero 8", Form(32, symmetric=True)),
    ("groups of 64", Form(64)),
    ("groups of 128, float32", Form(128, half=False)),
    ("one group", Form(half=False)),
    ("groups of 16", Form(16)),
    ("groups of 8", Form(8)),
    ("a group longer than the inputs", Form(256)),
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

OP = Op(
    "linear_int4",
    run,
    expected,
    TOLERANCE,
    common_cases(make_weight, FORMS, Form(32), "tiles", ("down",)),
    prepare=prepare,
    rounding=rounding,
    path=path,
)
SPEED = Op(
    "linear_int4", run, expected, TOLERANCE, speed_cases(make_weight, Form(32)), prepare=prepare, rounding=rounding
)
