"""Dense matrix product: the contract.

    out = x @ numbers.T + bias

x       [T, H]   float32 or bfloat16
weight  [O, H] numbers and a bias [O], or None, in the dtype of x, as `pack_dense` of the same table returns them
out     [T, O]   dtype of x, new; sums are float32 and rounded once
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """numbers [O, H], bias [O] or None."""

    numbers: "Tensor"
    bias: "Tensor | None"

    def values(self, rows: "Tensor") -> "Tensor":
        """[R, H]: the given rows."""
        return self.numbers[rows]
