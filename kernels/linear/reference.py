"""The dense linear layer in plain PyTorch. Knows the weight as the contract has it, nothing of panels."""

from torch import Tensor
from torch.nn import functional

from . import DenseWeight


def linear(x: Tensor, weight: DenseWeight) -> Tensor:
    """x [T, H] times the weight [O, H] transposed, plus its bias, as [T, O]; see the contract."""
    return functional.linear(x, weight.numbers, weight.bias)
