"""Matrix product with a weight of whole numbers in 4 bits with a scale and a minimum per group: the contract.

    out = x' @ value.T + bias        x' and value as in kernels/panels

x       [T, H]   float32 or bfloat16, H even; a row's numbers lie side by side
weight  `Int4Weight` as `pack_int4` of the same table returns it
bias    [O]      float32, or None
dtype   of out: float32 or bfloat16
out     [T, O]   new; rounded once
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """q [O, H / 2] uint8, input 2j in the low half of byte j, 2j + 1 in the high one, 0 .. 15 each.

    scale and minimum [O, ceil(H / group)], both float16 or both float32.
    """

    q: "Tensor"
    scale: "Tensor"
    minimum: "Tensor"
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.q.shape[0], 2 * self.q.shape[1]

    def codes(self) -> "Tensor":
        """[O, H], a whole number each."""
        return unpacked(self.q)

    def values(self, rows: "Tensor | None" = None) -> "Tensor":
        """[O, H] float32, or only the given rows: what the numbers stand for."""
        from ..panels.reference import dequantise

        if rows is None:
            return dequantise(self.codes(), self.scale, self.minimum, self.group)
        return dequantise(unpacked(self.q[rows]), self.scale[rows], self.minimum[rows], self.group)


def unpacked(q: "Tensor") -> "Tensor":
    """[..., H / 2] bytes -> [..., H] uint8, 0 .. 15 each."""
    import torch

    return torch.stack([q & 15, q >> 4], dim=-1).flatten(-2)


def packed(codes: "Tensor") -> "Tensor":
    """The other way round: [..., H] whole numbers 0 .. 15 -> [..., H / 2] uint8."""
    import torch

    codes = codes.to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4)
