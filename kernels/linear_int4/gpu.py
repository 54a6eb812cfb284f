"""The 4-bit linear on a GPU: activations become 8-bit floats where the chip multiplies them and groups are not short.

Elsewhere they stay as they are. Knows which product serves a weight.
"""

from typing import Any

from ..grouped import form_of
from ..grouped.choice import Choices
from ..grouped.layout import INT4, lay_out
from ..grouped.mixed import Mixed
from ..grouped.wide import Loose, Wide
from ..rounding import E4M3, OWN, Rounding
from . import Int4Weight

LEAST_WIDTH = 32  # what a matrix instruction of 8-bit numbers takes at once


def rounding(weight: Int4Weight, choices: Choices) -> Rounding:
    form = form_of(4, weight.group, weight.shape[1])
    served = choices.chip.has_fp8 and form is not None and form.width >= LEAST_WIDTH
    return Rounding(E4M3, weight.shape[1]) if served else Rounding(OWN)


def pack(weight: Int4Weight, choices: Choices) -> Any:
    """The weight for `Mixed` or `Wide`, or as it is where its groups fit no plane."""
    inputs = weight.shape[1]
    form = form_of(4, weight.group, inputs)
    if form is None:
        return Loose(weight)
    laid_out = lay_out(INT4, weight.codes(), weight.scale, weight.minimum, weight.group, inputs, form)
    return (Mixed if rounding(weight, choices).numbers == E4M3 else Wide)(laid_out, choices)
