"""Cases of the 8-bit linear layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import Kernels
from ..case import Op, Results, generator, normal
from ..chip import Chip
from ..grouped import form_of
from ..grouped.choice import Choices, narrow
from ..grouped.layout import lay_out
from ..panels.cases import SMOLLM2, Form, case, common_cases, expected, rounding, scales, speed_cases
from ..rounding import INT8
from . import Int8Weight


def run(kernels: Kernels, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Results:
    return (kernels.linear_int8(x, kernels.pack_int8(weight), bias, x.dtype),)


def prepare(kernels: Kernels, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Callable[[], Any]:
    packed = kernels.pack_int8(weight)
    return lambda: kernels.linear_int8(x, packed, bias, x.dtype)


def make_weight(outputs: int, inputs: int, form: Form) -> Int8Weight:
    scale, group = scales(outputs, inputs, form, 128)
    q = torch.randint(-128, 128, (outputs, inputs), generator=generator(4), dtype=torch.int8)
    minimum = normal(tuple(scale.shape), scale.dtype, 6, inputs**-0.5) if form.minimum else None
    balance = torch.rand(inputs, generator=generator(7)) + 0.5 if form.balanced else None
    return Int8Weight(q, scale, minimum, group, form.turned, balance)


def path(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> str:
    """The way on an H200."""
    form = form_of(8, weight.group, weight.shape[1])
    assert form is not None
    laid_out = lay_out(INT8, weight.q, weight.scale, weight.minimum, weight.group, weight.shape[1], form)
    return narrow(Choices(Chip(), {}), laid_out, len(x), INT8, x.dtype).path


CHANNEL = Form(half=False, minimum=False)
TURNED = Form(half=False, minimum=False, turned=True)
BALANCED = replace(TURNED, balanced=True)
TURNED_SHAPES = ((1, 64, 16), (7, 192, 33), (5, 256, 48), (70, 320, 51), (64, *SMOLLM2["qkv"]), (64, *SMOLLM2["down"]))
FORMS = (
    ("groups of 32", Form(32, minimum=False)),
    ("groups of 16", Form(16, half=False, minimum=False)),
    ("groups of 64 with a minimum", Form(64)),
    ("one group with a minimum", Form(half=False)),
    ("groups of 4", Form(4)),
    ("groups of 40", Form(40)),
    ("a group longer than the inputs", Form(256)),
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

OP = Op(
    "linear_int8",
    run,
    expected,
    TOLERANCE,
    (
        *common_cases(make_weight, FORMS, CHANNEL, "tiles", tuple(SMOLLM2)),
        *(
            case(make_weight, f"{name}, {n} x {h} x {o}", n, h, o, form, bias=True)
            for name, form in (("turned", TURNED), ("balanced", BALANCED))
            for n, h, o in TURNED_SHAPES
        ),
    ),
    prepare=prepare,
    rounding=rounding,
    path=path,
)
SPEED = Op(
    "linear_int8", run, expected, TOLERANCE, speed_cases(make_weight, CHANNEL), prepare=prepare, rounding=rounding
)
