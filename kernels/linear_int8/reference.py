"""The 8-bit linear layer in plain PyTorch. Knows the weight as the contract has it, nothing of panels."""

import torch
from torch import Tensor

from ..panels import segment_of
from ..panels.reference import dequantise, linear, turned
from . import Int8Weight


def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight [O, H] transposed, plus bias, as [T, O]; see the contract."""
    segment = segment_of(weight.group, weight.shape[1], weight.turned)
    values = dequantise(weight.q, weight.scale, weight.minimum, weight.group)
    return linear(turned(x, weight.balance) if weight.turned else x, values, bias, segment, dtype)
