"""Products of activations and grouped codes by Triton: what is launched for one, and with which constants.

Knows forms and choices, not checkpoints and not the kernels' arithmetic.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..launch import Launch
from .choice import Choice
from .gpu_kernels import Variant, add_parts, multiply
from .layout import GroupedWeight

COLUMNS = 512  # of a program that adds up parts
SAME = "same"  # codes that are operands as they are


@dataclass(frozen=True, slots=True)
class Activations:
    """x [T, H] as it is, or codes [T, H filled up] with what belongs to them.

    token_scale [T] or None; terms [steps * S or 1, T filled up] float32: sums of chains, or their scales (`scaled`), or
    None. Between 8-bit floats and 4-bit codes, which are read in units of 2^-9, scales and sums are in such units.
    """

    numbers: Tensor
    token_scale: Tensor | None = None
    terms: Tensor | None = None
    scaled: bool = False


_NUMBERS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "whole",
    torch.float8_e4m3fn: "e4m3",
}


def packed() -> bool:
    """Whether codes are unpacked two at a time, by instructions the interpreter does not know."""
    return not triton.knobs.runtime.interpret


def product(x: Activations, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype, choice: Choice) -> Tensor:
    """[T, O] in `dtype` by tiles, or by parts and their sum."""
    outputs, tokens = weight.shape[0], len(x.numbers)
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.numbers.device)
    if choice.splits == 1:
        plan(x, weight, bias, out, choice).run()
    else:
        parts = torch.empty((choice.splits, tokens, outputs), dtype=torch.float32, device=out.device)
        plan(x, weight, bias, parts, choice).run()
        plan_sum(parts, out).run()
    return out


def plan(x: Activations, weight: GroupedWeight, bias: Tensor | None, out: Tensor, choice: Choice) -> Launch:
    """The launch of `multiply`; out [T, O], or [splits, T, O] float32."""
    form, outputs, tokens = weight.form, weight.shape[0], len(x.numbers)
    per_split = -(-weight.steps // choice.splits)
    kind = SAME if x.numbers.itemsize == weight.codes.itemsize == 1 else weight.kind
    codes = weight.codes.view(x.numbers.dtype) if kind == SAME else weight.codes
    grid = (-(-tokens // choice.tokens), -(-outputs // choice.outputs), choice.splits)
    any_tensor = out  # where there is none; not read
    arguments = (
        *(x.numbers, x.numbers.stride(0)),
        *(any_tensor if part is None else part for part in (x.token_scale, x.terms)),
        *(codes, *weight.strides(), weight.scale),
        *(any_tensor if part is None else part for part in (weight.minimum, bias)),
        *(out, tokens, outputs, x.numbers.shape[1], weight.steps, per_split),
    )
    variant = Variant(
        kind=kind,
        numbers=_NUMBERS[x.numbers.dtype],
        zero=weight.zero,
        packed=packed(),
        width=form.width,
        planes=form.planes,
        chain=form.chain,
        grouped=form.grouped,
        even=x.numbers.shape[1] == weight.steps * form.step,
        minimum=weight.minimum is not None,
        scaled=x.scaled,
        token_scale=x.token_scale is not None,
        bias=bias is not None,
        split=choice.splits > 1,
        tokens=choice.tokens,
        outputs=choice.outputs,
    )
    return Launch(multiply, grid, arguments, {"V": variant}, choice.warps, choice.stages)


def plan_sum(parts: Tensor, out: Tensor) -> Launch:
    """The launch that adds parts [splits, T, O] up to out [T, O]."""
    return Launch(
        add_parts, (-(-out.numel() // COLUMNS),), (parts, out, out.numel(), parts.shape[0]), {"COLUMNS": COLUMNS}
    )
