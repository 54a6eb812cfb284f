"""Quantised linears in plain PyTorch: round the activations, dequantise the weight, multiply. Knows no panels."""

import torch
from torch import Tensor
from torch.nn import functional

from ..hadamard import hadamard, hadamard_product
from . import SEGMENT, TURNED

SMALLEST = 2.0**-100  # the largest number of a segment that counts as zero lies below


def quantise(x: Tensor, segment: int = SEGMENT) -> tuple[Tensor, Tensor]:
    """x [T, H] -> codes [T, segments, S] float32 (the last segment filled with zeros), scale [T, segments] float32."""
    count = -(-x.shape[1] // segment)
    pieces = functional.pad(x.float(), (0, count * segment - x.shape[1])).reshape(len(x), count, segment)
    largest = pieces.abs().amax(-1)
    usable = largest.isfinite() & (largest >= SMALLEST)
    most = torch.full_like(largest, 127)
    codes = (pieces * (most / largest).where(usable, 0.0).unsqueeze(-1)).round()
    scale = (largest / most).where(usable, 0.0).where(largest.isfinite(), torch.nan)
    return codes.where(usable.unsqueeze(-1), 0.0), scale


def rounded(x: Tensor, segment: int = SEGMENT) -> Tensor:
    """x [T, H] as the quantised linears see it, float32."""
    codes, scale = quantise(x, segment)
    return (codes * scale.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]


def turned(x: Tensor, balance: Tensor | None = None) -> Tensor:
    """x [T, H] times the factors `balance` [H], turned, float32."""
    return hadamard(x.float() if balance is None else x.float() * balance, TURNED)


def turned_weight(values: Tensor, balance: Tensor | None = None) -> Tensor:
    """values [O, H] float32 of a weight for inputs that are turned: divided by `balance` [H] first."""
    return hadamard_product(values if balance is None else values / balance, TURNED)


def turned_back(values: Tensor, balance: Tensor | None = None) -> Tensor:
    """The values [O, H] float32 that `turned_weight` was given."""
    values = hadamard_product(values, TURNED)
    return values if balance is None else values * balance


def dequantise(codes: Tensor, scale: Tensor, minimum: Tensor | None, group: int) -> Tensor:
    """codes [O, H], scale and minimum [O, groups] -> values [O, H] float32: one product and one sum, each rounded."""
    inputs = codes.shape[1]
    group = min(group, inputs)
    pieces = functional.pad(codes.float(), (0, -inputs % group)).reshape(*scale.shape, group)
    pieces = pieces * scale.float().unsqueeze(-1)
    if minimum is not None:
        pieces.add_(minimum.float().unsqueeze(-1))
    return pieces.flatten(1)[:, :inputs]


def linear(x: Tensor, values: Tensor, bias: Tensor | None, segment: int, dtype: torch.dtype) -> Tensor:
    """x [T, H] rounded, times values [O, H] float32 transposed, plus bias, as [T, O] in `dtype`."""
    out: Tensor = functional.linear(rounded(x, segment), values, None if bias is None else bias.float())
    return out.to(dtype)
