"""The 8-bit linear on a GPU: whole numbers on both sides where an output has one scale.

Elsewhere activations stay as they are. Knows which product serves a weight.
"""

from typing import Any

from ..grouped import form_of
from ..grouped.choice import Choices
from ..grouped.layout import lay_out
from ..grouped.narrow import Narrow
from ..grouped.wide import Loose, Wide
from ..rounding import INT8, OWN, Rounding
from . import Int8Weight


def rounding(weight: Int8Weight) -> Rounding:
    inputs = weight.shape[1]
    whole = weight.group >= inputs and weight.minimum is None and not weight.turned
    return Rounding(INT8, inputs) if whole else Rounding(OWN)


def pack(weight: Int8Weight, choices: Choices) -> Any:
    """The weight for `Narrow` or `Wide`, or as it is where its groups fit no plane or it is turned."""
    inputs, rule = weight.shape[1], rounding(weight)
    form = form_of(8, weight.group, inputs)
    if form is None or weight.turned:
        return Loose(weight)
    laid_out = lay_out(INT8, weight.q, weight.scale, weight.minimum, weight.group, inputs, form)
    return Narrow(laid_out, choices, rule) if rule.numbers == INT8 else Wide(laid_out, choices)
