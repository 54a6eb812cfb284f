"""The 4-bit linear on a GPU: activations stay as they are. Knows which product serves a weight."""

from typing import Any

from ..grouped import form_of
from ..grouped.choice import Choices
from ..grouped.layout import INT4, lay_out
from ..grouped.wide import Loose, Wide
from ..rounding import OWN, Rounding
from . import Int4Weight


def rounding(weight: Int4Weight) -> Rounding:
    return Rounding(OWN)


def pack(weight: Int4Weight, choices: Choices) -> Any:
    """The weight for `Wide`, or as it is where its groups fit no plane."""
    form = form_of(4, weight.group, weight.shape[1])
    if form is None:
        return Loose(weight)
    inputs = weight.shape[1]
    return Wide(lay_out(INT4, weight.codes(), weight.scale, weight.minimum, weight.group, inputs, form), choices)
