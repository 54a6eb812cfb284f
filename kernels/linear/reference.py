"""The dense linear layer in plain PyTorch. Knows nothing of packed weights."""

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, H] times weight [O, H] transposed, plus bias, as [T, O]; see the contract."""
    return functional.linear(x, weight, bias)
