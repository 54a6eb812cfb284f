"""The 8-bit float linear on a GPU: 8-bit floats on both sides where the chip multiplies them and groups are long.

Elsewhere activations stay as they are. Knows which product serves a weight.
"""

from typing import Any

import torch

from ..grouped import STEP, form_of
from ..grouped.choice import Choices
from ..grouped.layout import lay_out
from ..grouped.narrow import Narrow
from ..grouped.wide import Loose, Wide
from ..rounding import E4M3, OWN, Rounding
from . import Fp8Weight, check_group


def rounding(weight: Fp8Weight, choices: Choices) -> Rounding:
    inputs = weight.shape[1]
    if not choices.chip.has_fp8 or (weight.group < inputs and weight.group % STEP):
        return Rounding(OWN)
    return Rounding(E4M3, inputs if weight.group >= inputs else STEP)


def pack(weight: Fp8Weight, choices: Choices) -> Any:
    """The weight for `Narrow` or `Wide`, or as it is where its groups fit no plane. Raises ValueError as on a CPU."""
    inputs, rule = weight.shape[1], rounding(weight, choices)
    check_group(weight.group, inputs)
    form = form_of(8, weight.group, inputs)
    if form is None:
        return Loose(weight)
    codes = weight.q.view(torch.uint8)
    laid_out = lay_out(E4M3, codes, weight.scale.float(), None, weight.group, inputs, form)
    return Narrow(laid_out, choices, rule) if rule.numbers == E4M3 else Wide(laid_out, choices)
