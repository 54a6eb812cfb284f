"""Matrix product with a weight in 8-bit floats (e4m3) with a scale per output, or per output and group: the contract.

    value[o, h] = scale[o, h // G] * q[o, h]
    out = x' @ value.T + bias        x' as in kernels/panels: on CPUs x rounded to bfloat16

x       [T, H]   float32 or bfloat16; a row's numbers lie side by side
weight  `Fp8Weight` as `pack_fp8` of the same table returns it
bias    [O]      float32, or None
dtype   of out: float32 or bfloat16
out     [T, O]   new; products are exact, sums float32, rounded once

A row with a number that is not finite gives a row of NaN (or infinities, see there), and leaves the others alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448.0  # that e4m3 holds
NAN_CODE = 0x7F  # but for the sign


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """q [O, H] float8_e4m3fn, none of them NaN. scale [O, ceil(H / group)] float32; the last group may be short."""

    q: "Tensor"
    scale: "Tensor"
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.q.shape[0], self.q.shape[1]

    @property
    def minimum(self) -> None:
        """There is none: a float is its own sign."""

    def values(self, rows: "Tensor | None" = None) -> "Tensor":
        """[O, H] float32, or only the given rows: what the numbers stand for."""
        from ..panels.reference import dequantise

        if rows is None:
            return dequantise(self.q, self.scale, None, self.group)
        return dequantise(self.q[rows], self.scale[rows], None, self.group)


def check_group(group: int, inputs: int) -> None:
    """Raises ValueError for a group size that is not supported: pairs of inputs are not cut."""
    if group < inputs and group % 2:
        raise ValueError(f"fp8 linear: groups of {group} inputs, an odd number")
