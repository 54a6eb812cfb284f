"""The gated activation in plain PyTorch. Knows the order of gate and up in a row."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2F] as [T, F]; see the contract."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
