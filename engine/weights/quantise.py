"""Float weights to fewer bits: 8-bit whole numbers or floats for each output, or 4 bits for each group with a search
for its range.

Knows rounding and the error it adds; not which layers it serves.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchgen.kernels.linear_fp8 import LARGEST, Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight, packed
from batchgen.kernels.linear_int8 import Int8Weight
from batchgen.kernels.panels.reference import turned_weight

from .repack import in_half

GROUPS = (128, 64, 32)
# Shares of a group's range tried beside all of it: a narrower range rounds most weights finer and clips a few.
RANGES = (0.94, 0.88, 0.82, 0.76)
_LARGEST_HALF = 65504.0
_ROUNDER = 1.5 * 2.0**23


@dataclass(slots=True)
class RoundingError:
    """Sums of squares of weights and of what rounding changed, by kind of tensor."""

    squares: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, kind: str, values: Tensor, rounded: Tensor) -> None:
        """Raises ValueError where there is a NaN or an infinity."""
        lost, whole = self.squares.get(kind, (0.0, 0.0))
        self.squares[kind] = lost + _squares(values - rounded), whole + _squares(values)

    def relative(self) -> dict[str, float]:
        """Root mean square of the error over that of the weights."""
        return {kind: (lost / whole) ** 0.5 if whole else 0.0 for kind, (lost, whole) in self.squares.items()}


def _squares(values: Tensor) -> float:
    """The sum of squares; in double precision where those of float32 overflow."""
    total = float(values.square().sum(dtype=torch.float64))
    if math.isfinite(total):
        return total
    if not bool(values.isfinite().all()):
        raise ValueError("NaN or infinity among the weights cannot be rounded")
    return float(values.double().square().sum())


def group_size(inputs: int) -> int:
    """The largest group that divides the inputs; else the smallest, and the last group is short."""
    return next((size for size in GROUPS if inputs % size == 0), GROUPS[-1])


def to_int8(
    values: Tensor, held: torch.dtype = torch.float32, turn: bool = False, balance: Tensor | None = None
) -> Int8Weight:
    """values [O, H] float32 -> one scale for each output, exact in `held`: 127 at its largest weight, once turned.

    `balance` [H]: factors for the inputs of a weight that is turned.
    """
    values = turned_weight(values, balance) if turn else values
    scale = (values.abs().amax(1, keepdim=True) / 127).to(held).float()
    divisor = scale.where(scale > 0, torch.ones(()))
    codes = _nearest(values / divisor).clamp_(-128, 127).to(torch.int8)
    return Int8Weight(codes, scale, None, values.shape[1], turn, balance if turn else None)


def to_fp8(values: Tensor, held: torch.dtype = torch.float32) -> Fp8Weight:
    """values [O, H] float32 -> one scale for each output, exact in `held`: the largest e4m3 at its largest weight."""
    scale = (values.abs().amax(1, keepdim=True) / LARGEST).to(held).float()
    divisor = scale.where(scale > 0, torch.ones(()))
    return Fp8Weight((values / divisor).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale, values.shape[1])


def to_int4(values: Tensor) -> Int4Weight:
    """values [O, H] float32, H even -> scale and minimum for each group, of the range that rounds it best."""
    group = group_size(values.shape[1])
    whole = values.shape[1] // group * group
    parts = [values[:, :whole].view(len(values), -1, group), values[:, whole:].unsqueeze(1)]
    fits = [_best_range(part) for part in parts if part.numel()]
    codes, scale, minimum = (torch.cat([part.flatten(1) for part in alike], dim=1) for alike in zip(*fits, strict=True))
    scale, low = in_half(scale, minimum)
    assert low is not None
    return Int4Weight(packed(codes), scale, low, group)


def to_symmetric_int4(values: Tensor, group: int, held: torch.dtype) -> tuple[Tensor, Tensor]:
    """values [O, H] float32, H a multiple of `group` -> codes [O, H] and scale [O, groups], exact in `held`.

    A value is scale * (code - 8). Codes reach further down than up, so a scale has the sign that puts the largest
    value there; of the ranges tried the least square error.
    """
    parts = values.view(len(values), -1, group)
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    extreme = low.where(-low > high, high)
    best = _symmetric(parts, extreme / -8, held)
    for share in (8 / 7.5, *RANGES):
        best = best.or_better(_symmetric(parts, extreme * (share / -8), held))
    return best.codes.flatten(1), best.scale.squeeze(-1)


def _symmetric(values: Tensor, scale: Tensor, held: torch.dtype) -> "_Fit":
    scale = scale.to(held).float()
    return _Fit(values, scale, -8 * scale)


def _best_range(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[O, groups, G] -> codes alike, scale and minimum [O, groups, 1]: of the ranges tried the least square error."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    hold = _as_half if float(torch.maximum(low.abs(), high.abs()).max()) <= _LARGEST_HALF else torch.clone
    best = _Fit(values, hold(reach * (2 / 15)), hold(low))
    for share in RANGES:
        best = best.or_better(_Fit(values, hold(reach * (share * 2 / 15)), hold(middle - reach * share)))
    best = best.or_better(_Fit(values, *map(hold, _least_squares(values, best.codes))))
    return best.codes, best.scale, best.minimum


class _Fit:
    """Codes of values for a scale and a minimum per group, and their square error."""

    def __init__(self, values: Tensor, scale: Tensor, minimum: Tensor) -> None:
        self.scale, self.minimum, self.codes = scale, minimum, _codes(values, scale, minimum)
        self.error = (self.codes * scale + minimum - values).square_().sum(-1, keepdim=True)

    def or_better(self, other: "_Fit") -> "_Fit":
        """Of each group the fit with the smaller error, this one where they are equal."""
        better = other.error < self.error
        for name in ("scale", "minimum", "codes", "error"):
            setattr(self, name, getattr(other, name).where(better, getattr(self, name)))
        return self


def _least_squares(values: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum that fit the values best when the codes stay."""
    code_mean, mean = codes.mean(-1, keepdim=True), values.mean(-1, keepdim=True)
    spread = codes - code_mean
    scale = (spread * (values - mean)).sum(-1, keepdim=True) / spread.square().sum(-1, keepdim=True).clamp_min(1e-9)
    return scale, mean - scale * code_mean


def _as_half(values: Tensor) -> Tensor:
    """As float16 will hold them."""
    return values.half().float()


def _codes(values: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    divisor = scale.where(scale != 0, torch.ones(()))
    return _nearest((values - minimum) / divisor).clamp_(0, 15)


def _nearest(values: Tensor) -> Tensor:
    """Rounded, ties to even, numbers below 2^22. `round` would wake all threads for a slice of any size."""
    return values.add_(_ROUNDER).sub_(_ROUNDER)
