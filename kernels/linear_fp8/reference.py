"""The 8-bit float linear layer in plain PyTorch. Knows the weight as the contract has it, nothing of panels."""

import torch
from torch import Tensor
from torch.nn import functional

from . import Fp8Weight


def linear_fp8(x: Tensor, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, H] times the weight [O, H] transposed, plus bias, as [T, O]; see the contract."""
    out: Tensor = functional.linear(x.bfloat16().float(), weight.values(), None if bias is None else bias.float())
    return out.to(dtype)
