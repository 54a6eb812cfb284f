"""The 8-bit linear layer in plain PyTorch. Knows the weight as the contract has it, nothing of panels."""

import torch
from torch import Tensor

from ..panels import segment_of
from ..panels.reference import linear
from . import Int8Weight


def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight [O, H] transposed, plus bias, as [T, O]; see the contract."""
    return linear(x, weight.values(), bias, segment_of(weight.group, weight.shape[1]), dtype)
