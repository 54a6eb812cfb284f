"""Matrix product with a weight of whole numbers in 8 bits, per output or per group of inputs: the contract.

    out = x' @ value.T + bias        x' and value as in kernels/panels

x       [T, H]   float32 or bfloat16; a row's numbers lie side by side
weight  `Int8Weight` as `pack_int8` of the same table returns it
bias    [O]      float32, or None
dtype   of out: float32 or bfloat16
out     [T, O]   new; rounded once
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """q [O, H] int8, -128 .. 127. scale and minimum [O, ceil(H / group)], both float16 or both float32.

    turned: they stand for the numbers turned, see kernels/panels; one scale for each output, H a multiple of 64.
    balance: [H] float32 above 0, of a turned weight: what numbers were divided by before, and inputs are multiplied by.
    """

    q: "Tensor"
    scale: "Tensor"
    minimum: "Tensor | None"
    group: int
    turned: bool = False
    balance: "Tensor | None" = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.q.shape[0], self.q.shape[1]

    def codes(self) -> "Tensor":
        """[O, H], a whole number each."""
        return self.q

    def values(self, rows: "Tensor | None" = None) -> "Tensor":
        """[O, H] float32, or only the given rows: what the numbers stand for."""
        from ..panels.reference import dequantise, turned_back

        if rows is not None:
            minimum = None if self.minimum is None else self.minimum[rows]
            return replace(self, q=self.q[rows], scale=self.scale[rows], minimum=minimum).values()
        values = dequantise(self.q, self.scale, self.minimum, self.group)
        return turned_back(values, self.balance) if self.turned else values
