"""Cases of the 8-bit float linear layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import Kernels
from ..case import Op, Results, generator
from ..chip import Chip
from ..grouped import form_of
from ..grouped.choice import Choices, narrow
from ..grouped.layout import lay_out
from ..panels.cases import NUMBERS, SMOLLM2, Form, common_cases, rounded, rounding, scales, speed_cases
from ..rounding import E4M3, Rounding
from . import Fp8Weight


def run(kernels: Kernels, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Results:
    return (kernels.linear_fp8(x, kernels.pack_fp8(weight), bias, x.dtype),)


def prepare(kernels: Kernels, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Callable[[], Any]:
    packed = kernels.pack_fp8(weight)
    return lambda: kernels.linear_fp8(x, packed, bias, x.dtype)


def make_weight(outputs: int, inputs: int, form: Form) -> Fp8Weight:
    """Every code but NaN, subnormal ones and both zeros among them."""
    scale, group = scales(outputs, inputs, form, 128)
    codes = torch.randint(0, 254, (outputs, inputs), generator=generator(4), dtype=torch.uint8)
    codes = codes + (codes >= 0x7F)
    return Fp8Weight(codes.view(torch.float8_e4m3fn), scale, group)


def expected(x: Tensor, weight: Fp8Weight, bias: Tensor | None, rule: Rounding) -> Results:
    """In float64, each code by its definition."""
    numbers = NUMBERS[weight.q.view(torch.uint8).long()]
    scale = weight.scale.double().repeat_interleave(weight.group, 1)[:, : x.shape[1]]
    out = rounded(x, rule) @ (numbers * scale).T
    return (out if bias is None else out + bias.double(),)


def path(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> str:
    """The way on an H200."""
    form = form_of(8, weight.group, weight.shape[1])
    assert form is not None
    laid_out = lay_out(E4M3, weight.q.view(torch.uint8), weight.scale, None, weight.group, weight.shape[1], form)
    return narrow(Choices(Chip(), {}), laid_out, len(x), E4M3, x.dtype).path


CHANNEL = Form(half=False, minimum=False)
FORMS = (
    ("groups of 128", Form(128, half=False, minimum=False)),
    ("groups of 16", Form(16, half=False, minimum=False)),
    ("groups of 6", Form(6, half=False, minimum=False)),
    ("a group longer than the inputs", Form(256, half=False, minimum=False)),
    ("one group", CHANNEL),
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

OP = Op(
    "linear_fp8",
    run,
    expected,
    TOLERANCE,
    common_cases(make_weight, FORMS, CHANNEL, "tiles", tuple(SMOLLM2)),
    prepare=prepare,
    rounding=rounding,
    path=path,
)
SPEED = Op(
    "linear_fp8", run, expected, TOLERANCE, speed_cases(make_weight, CHANNEL), prepare=prepare, rounding=rounding
)
