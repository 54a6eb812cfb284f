"""Rotary position encoding: from a `RopeSpec` to tables of cosines and sines.

Knows the formulas of models.md §3 in float32; which pairs of elements they turn is the kernels' business.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.kernels import Kernels

from .spec import RopeSpec

Frequencies = tuple[Tensor, float]  # [width / 2] float32 radians per position, and the factor on cos and sin


class Rope:
    """Tables of cos and sin, [choices * context, width / 2] float32: one table per choice.

    Types whose frequencies depend on the length of the row choose once per row (`choice`), from prompt and max_tokens
    together, so that the keys of a row never change under it. Rows with different choices share no prefix.
    """

    def __init__(self, spec: RopeSpec, context: int, device: torch.device, kernels: Kernels) -> None:
        self._spec = spec
        self._context = context
        tables = [self._table(length) for length in _choice_lengths(spec, context)]
        self._kernels = kernels
        self._choices = len(tables)
        self._cos = torch.cat([cos for cos, _ in tables]).to(device)
        self._sin = torch.cat([sin for _, sin in tables]).to(device)

    def choice(self, length: int) -> int:
        """The table of a row of `length` tokens in all: 1 for longrope beyond its original context, else 0."""
        return int(self._spec.kind == "longrope" and length > self._spec.parameters["original_max_position_embeddings"])

    def rows(self, positions: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, width / 2] float32, of positions [T] under the choices [T]."""
        index = positions if self._choices == 1 else positions + choice * self._context
        return self._kernels.take_rows(self._cos, index), self._kernels.take_rows(self._sin, index)

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        frequencies, factor = rope_frequencies(self._spec, length)
        angles = torch.arange(self._context, dtype=torch.float32)[:, None] * frequencies
        return angles.cos() * factor, angles.sin() * factor


def _choice_lengths(spec: RopeSpec, context: int) -> list[int]:
    """A row length for each choice. `dynamic` has one: it changes nothing up to the context, which no row exceeds."""
    if spec.kind != "longrope" or spec.parameters["original_max_position_embeddings"] >= context:
        return [context] if spec.kind == "dynamic" else [1]
    return [1, context]


def rope_frequencies(spec: RopeSpec, length: int) -> Frequencies:
    """The frequencies for a row of `length` tokens, and the factor on cos and sin."""
    return _FORMULAS[spec.kind](spec, length)


def _powers(theta: float, width: int) -> Tensor:
    return theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def _default(spec: RopeSpec, length: int) -> Frequencies:
    return 1.0 / _powers(spec.theta, spec.width), 1.0


def _linear(spec: RopeSpec, length: int) -> Frequencies:
    return 1.0 / _powers(spec.theta, spec.width) / spec.parameters["factor"], 1.0


def _dynamic(spec: RopeSpec, length: int) -> Frequencies:
    factor, width = spec.parameters["factor"], spec.width
    stretch = factor * max(length, spec.context) / spec.context - (factor - 1)
    return 1.0 / _powers(spec.theta * stretch ** (width / (width - 2)), width), 1.0


def _llama3(spec: RopeSpec, length: int) -> Frequencies:
    frequencies, _ = _default(spec, length)
    factor, original = spec.parameters["factor"], spec.parameters["original_max_position_embeddings"]
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    long = torch.where(wavelength > original / low, frequencies / factor, blended)
    return torch.where(wavelength < original / high, frequencies, long), 1.0


def _yarn(spec: RopeSpec, length: int) -> Frequencies:
    factor, powers = spec.parameters["factor"], _powers(spec.theta, spec.width)
    low, high = _yarn_range(spec)
    ramp = ((torch.arange(spec.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep, _yarn_factor(spec)


def _yarn_range(spec: RopeSpec) -> tuple[float, float]:
    values = spec.parameters
    low = _yarn_dimension(spec, values.get("beta_fast", 32))
    high = _yarn_dimension(spec, values.get("beta_slow", 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.width - 1)
    return low, high + 0.001 if low == high else high


def _yarn_dimension(spec: RopeSpec, turns: float) -> float:
    """The (fractional) dimension that turns `turns` times over the original context."""
    original = spec.parameters["original_max_position_embeddings"]
    return spec.width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))


def _yarn_factor(spec: RopeSpec) -> float:
    values = spec.parameters
    if "attention_factor" in values:
        return float(values["attention_factor"])
    if values.get("mscale") and values.get("mscale_all_dim"):
        return _mscale(values["factor"], values["mscale"]) / _mscale(values["factor"], values["mscale_all_dim"])
    return _mscale(values["factor"], 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(spec: RopeSpec, length: int) -> Frequencies:
    values = spec.parameters
    original = values["original_max_position_embeddings"]
    divisors = values["long_factor"] if length > original else values["short_factor"]
    frequencies = 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(spec.theta, spec.width))
    if "attention_factor" in values:
        return frequencies, float(values["attention_factor"])
    factor = values.get("factor", spec.context / original)
    return frequencies, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


_FORMULAS: dict[str, Callable[[RopeSpec, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
