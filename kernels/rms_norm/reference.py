"""RMS normalisation in plain PyTorch. Knows the cast order of the contract and nothing of models."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., H] normalised over H and scaled by weight [H]; see the contract."""
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * inverse).to(x.dtype)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, H] is added to the residual in place; returns the residual normalised; see the contract."""
    return rms_norm(residual.add_(x), weight, epsilon)
