"""The reference's op table, but for activations, which it rounds as another table does: what that one must come to.

Knows the rules of rounding, not how any kernel follows them.
"""

from typing import Any

import torch
from torch import Tensor

from batchgen.kernels import Kernels
from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight
from batchgen.kernels.linear_int8 import Int8Weight
from batchgen.kernels.panels.reference import rounded
from batchgen.kernels.rounding import BFLOAT16, INT8, OWN, Rounding
from batchgen.kernels.tables import ReferenceKernels

Weight = Int8Weight | Int4Weight | Fp8Weight


def as_rounded(x: Tensor, rule: Rounding) -> Tensor:
    """x as a table of this rule sees it, float32."""
    if rule.numbers == INT8:
        return rounded(x, rule.segment)
    if rule.numbers in (OWN, BFLOAT16):
        return x.float()
    parts = x.float().unflatten(1, (-1, rule.segment))
    unit = parts.abs().amax(-1, keepdim=True) / 448
    return ((parts / unit).to(torch.float8_e4m3fn).float() * unit).flatten(1)


class SameRounding(ReferenceKernels):
    """Products of plain numbers: activations as another table rounds them, times what the codes stand for."""

    def __init__(self, table: Kernels) -> None:
        self._table = table

    def rounding(self, weight: Weight) -> Rounding:
        return self._table.rounding(weight)

    def turns(self, inputs: int) -> bool:
        return self._table.turns(inputs)

    def linear_int8(self, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = as_rounded(x, self.rounding(weight)) @ weight.values().float().t()
        return (out if bias is None else out + bias).to(dtype)

    linear_int4 = linear_fp8 = linear_int8
