"""Float weights to whole numbers at load: 8 bits for each output, or 4 bits for each group with a search for its range.

Knows rounding and the error it adds; not which layers it serves.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchgen.kernels.linear_int4 import Int4Weight, packed
from batchgen.kernels.linear_int8 import Int8Weight

GROUPS = (128, 64, 32)
# Shares of a group's range tried: a narrower range rounds most weights finer and clips a few.
RANGES = (1.0, 0.94, 0.88, 0.82, 0.76)
_LARGEST_HALF = 65504.0
_ROUNDER = 1.5 * 2.0**23


@dataclass(slots=True)
class RoundingError:
    """Sums of squares of weights and of what rounding changed, by kind of tensor."""

    squares: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, kind: str, values: Tensor, rounded: Tensor) -> None:
        lost, whole = self.squares.get(kind, (0.0, 0.0))
        difference = float((values - rounded).square().sum(dtype=torch.float64))
        self.squares[kind] = lost + difference, whole + float(values.square().sum(dtype=torch.float64))

    def relative(self) -> dict[str, float]:
        """Root mean square of the error over that of the weights."""
        return {kind: (lost / whole) ** 0.5 if whole else 0.0 for kind, (lost, whole) in self.squares.items()}


def group_size(inputs: int) -> int:
    """The largest group that divides the inputs; else the smallest, and the last group is short."""
    return next((size for size in GROUPS if inputs % size == 0), GROUPS[-1])


def to_int8(values: Tensor) -> Int8Weight:
    """values [O, H] float32 -> one scale for each output, 127 at its largest weight."""
    scale = values.abs().amax(1, keepdim=True) / 127
    divisor = scale.where(scale > 0, torch.ones(()))
    return Int8Weight(_nearest(values / divisor).to(torch.int8), scale, None, values.shape[1])


def to_int4(values: Tensor) -> Int4Weight:
    """values [O, H] float32, H even -> scale and minimum for each group, of the range that rounds it best."""
    inputs = values.shape[1]
    group = group_size(inputs)
    codes, scale, minimum = _best_range(_grouped(values, group))
    if max(float(scale.max()), float(minimum.abs().max())) <= _LARGEST_HALF:
        scale, minimum = scale.half(), minimum.half()
    return Int4Weight(packed(codes.flatten(1)[:, :inputs]), scale, minimum, group)


def _grouped(values: Tensor, group: int) -> Tensor:
    """[O, H] -> [O, groups, G]; a short last group is filled with its last weight, which widens no range."""
    missing = -values.shape[1] % group
    filled = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
    return filled.unflatten(1, (-1, group))


def _best_range(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[O, groups, G] -> codes alike, scale and minimum [O, groups]: the tried range with the least square error."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    best = torch.full_like(low, torch.inf)
    best_scale, best_minimum = torch.zeros_like(low), low.clone()
    for share in RANGES:
        scale, minimum = _as_half(reach * (share * 2 / 15)), _as_half(middle - reach * share)
        error = (_codes(values, scale, minimum) * scale + minimum - values).square_().sum(-1, keepdim=True)
        better = error < best
        best = error.where(better, best)
        best_scale, best_minimum = scale.where(better, best_scale), minimum.where(better, best_minimum)
    return _codes(values, best_scale, best_minimum), best_scale.squeeze(-1), best_minimum.squeeze(-1)


def _as_half(values: Tensor) -> Tensor:
    """As float16 will hold them; numbers too large for it stay."""
    return values.half().float().where(values.abs() <= _LARGEST_HALF, values)


def _codes(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    divisor = scale.where(scale > 0, torch.ones(()))
    return _nearest((values - minimum) / divisor).clamp_(0, 15)


def _nearest(values: Tensor) -> Tensor:
    """Rounded, ties to even, numbers below 2^22. `round` would wake all threads for a slice of any size."""
    return values.add_(_ROUNDER).sub_(_ROUNDER)
