"""What a case of an op is: inputs, the truth in float64, how near a result must come, and what the work amounts to.

Knows no op. The cases of an op stand in its folder; tests and benchmarks run them on every backend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs of an op."""

    name: str
    make: Callable[[torch.dtype], Arguments]  # the same values at every call, on the CPU
    elements: int = 0  # read and written at least, in units of the dtype
    bytes: int = 0  # read besides, whatever the dtype
    operations: int = 0  # floating point operations
    path: Any = None  # the launch path the case must take, where the op has a choice


@dataclass(frozen=True, slots=True)
class Op:
    """An op of the table with its cases."""

    name: str
    run: Callable[..., Results]  # (kernels, *arguments)
    expected: Callable[..., Results]  # (*arguments): an independent, naive computation
    tolerance: Mapping[torch.dtype, float]  # of |result - expected| / (1 + |expected|); 0 means equal bit for bit
    cases: tuple[Case, ...]
    path: Callable[..., Any] | None = None  # (*arguments): what Case.path is compared with
    prepare: Callable[..., Callable[[], Any]] | None = None  # (kernels, *arguments): the call to time; None: all of run
    rounding: Callable[..., Any] | None = None  # (kernels, *arguments): the table's rule, which `expected` takes last

    def truth(self, kernels: Any, arguments: Arguments) -> Results:
        """What `expected` gives for these arguments, by the rule of the table where the contract leaves one open."""
        rule = () if self.rounding is None else (self.rounding(kernels, *arguments),)
        return self.expected(*arguments, *rule)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers that the dtype holds exactly."""
    return (torch.randn(shape, generator=generator(seed)) * scale).to(dtype)


def error(result: Tensor, expected: Tensor) -> float:
    """The largest deviation, relative to 1 + |expected|. Whole numbers, NaN and infinities must be equal."""
    if result.shape != expected.shape or result.is_floating_point() != expected.is_floating_point():
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(result, expected) else float("inf")
    result, expected = result.double(), expected.double()
    special = ~expected.isfinite()
    if not torch.equal(result[special].nan_to_num(nan=7.0), expected[special].nan_to_num(nan=7.0)):
        return float("inf")
    deviation = ((result - expected).abs() / (1 + expected.abs()))[~special]
    worst = float(deviation.max()) if deviation.numel() else 0.0
    return worst if worst == worst else float("inf")
