"""Draws from a linear by the other ops of a table. Knows their order, no arithmetic."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..sampling import Filters
from . import DrawnLinear

if TYPE_CHECKING:
    from .. import Kernels


def draw(kernels: "Kernels", x: Tensor, head: DrawnLinear, filters: Filters) -> tuple[Tensor, Tensor]:
    """Token ids [R] and whether their rows were finite [R]; see the contract."""
    logits = head.product(x).float()
    logits[:, head.vocabulary :] = -torch.inf
    return kernels.sample(logits, filters), kernels.finite(logits)
