"""What the quantised linears share on a GPU: one layout, one product kernel, one table of paths.

The inputs of a weight are cut into steps of P planes of W inputs. A step is what a program reads at once: with 4-bit
codes one int16 for every output and place of a plane, plane p in bits 4p .. 4p + 3; with 8-bit codes the planes lie one
behind the other. So the bytes that neighbouring threads read are neighbours, and the numbers of a plane come out of a
word by a shift and a mask, in the order in which the matrix instructions want them. C planes in a row (the chain) have
one scale, by which their sum of whole numbers times activations is multiplied in float32:

    out[t, o] = a[t] * sum over chains c of (scale[o, c] * sum of q * x over c + minimum[o, c] * sum of x over c) + bias

where a is the scale of a token whose activations are 8-bit codes, or 1. Weights that have one scale for each output are
one chain. Sums are float32 (int32 where both sides are whole numbers), in an order that depends on shapes alone. Where
activations are 8-bit floats, 4-bit codes are such floats to the matrix instructions: the bits of q are those of the
float q / 512. What is to be taken from the codes, 8 or nothing, is then taken from the sums of q * x instead.
"""

from dataclasses import dataclass
from math import gcd

STEP = 128  # inputs, where the group allows it
LEAST_WIDTH = 16  # what a matrix instruction of 16-bit numbers takes at once
NIBBLES = 4  # in a word


@dataclass(frozen=True, slots=True)
class Form:
    """How the inputs are cut: W inputs a plane, P planes a step, C planes a chain; `grouped`: more than one scale."""

    bits: int
    width: int
    planes: int
    chain: int
    grouped: bool

    @property
    def step(self) -> int:
        """Inputs that are read at once."""
        return self.width * self.planes

    @property
    def scales(self) -> int:
        """Scales of an output in a step."""
        return self.planes // self.chain if self.grouped else 1


def form_of(bits: int, group: int, inputs: int) -> Form | None:
    """The form of a weight with groups of `group` inputs; None where groups are too short or odd for a plane."""
    if group >= inputs:
        return Form(bits, 32, NIBBLES, NIBBLES, False) if bits == 4 else Form(bits, _even_width(inputs), 1, 1, False)
    width = gcd(group, 32 if bits == 4 else STEP)
    if width < LEAST_WIDTH:
        return None
    planes = NIBBLES if bits == 4 else min(NIBBLES, STEP // width)
    chain = gcd(planes, group // width)
    return Form(bits, width, planes, chain, True)


def _even_width(inputs: int) -> int:
    """The longest plane that leaves nothing over; STEP, filled up with zeros, where none does."""
    return next((width for width in (STEP, 64, 32) if inputs % width == 0), STEP)
