"""How linears are held: expanded to the compute dtype, or in 8 or 4 bits with scales.

Knows what a checkpoint's tensor becomes in each format and which projections may be fused; not where tensors lie.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels import Kernels
from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_int8 import Int8Weight

from ..linear import DenseFormat, Linear, QuantisedLinear, SideBySide, WeightFormat
from ..spec import ModelError
from .quantise import RoundingError, to_fp8, to_int4, to_int8
from .repack import QuantisedWeight, Stored, stacked
from .tensors import TensorSource

log = logging.getLogger(__name__)

HEAD = "head"
Balance = Callable[[str], Tensor | None]  # factors [H] for the inputs of a part, see kernels/panels


def int8_weight(source: TensorSource, part: str, target: "QuantisedFormat") -> Stored:
    """8-bit and 6-bit blocks as they are; anything else rounded, one scale for each output, turned if it pays."""
    stored = source.quantised(Int8Weight)
    if stored is not None:
        return stored
    if not target.kernels.turns(source.shape[1]):
        return _rounded(source, part, target.errors, to_int8)
    return _turned(source, part, target)


def int8_model_weight(source: TensorSource, part: str, target: "QuantisedFormat") -> Stored:
    """The same, but for a head in blocks, which is rounded once more where it can be turned.

    What blocks know better, activations that are rounded between them lose, and products with blocks take 1.4 times as
    long. (SmolLM2 with a Q8_0 head, 64 rows: same choice 0.980 -> 0.987, KL 0.0034 -> 0.0031.)
    """
    turns = part == HEAD and target.kernels.turns(source.shape[1]) and _in_blocks(source)
    return (_turned if turns else int8_weight)(source, part, target)


def _in_blocks(source: TensorSource) -> bool:
    """Stored in 8 bits with several scales for an output."""
    stored = source.quantised(Int8Weight)
    return stored is not None and stored.weight.group < source.shape[1]


def _turned(source: TensorSource, part: str, target: "QuantisedFormat") -> Stored:
    return _rounded(source, part, target.errors, partial(to_int8, turn=True, balance=target.balance(part)))


def int4_weight(source: TensorSource, part: str, target: "QuantisedFormat") -> Stored:
    """What is stored in fewer than 8 bits as it is, any other head in 8 bits, anything else rounded to 4."""
    stored = source.quantised() if source.stored_bits < 8 else None
    if stored is not None:
        return stored
    if part == HEAD:
        return int8_weight(source, part, target)
    if source.shape[1] % 2:
        raise ModelError(f"model.weights: int4 needs an even number of inputs, {part} has {source.shape[1]}; use int8")
    return _rounded(source, part, target.errors, to_int4)


def fp8_weight(source: TensorSource, part: str, target: "QuantisedFormat") -> Stored:
    """8-bit floats as they are, any other head in whole numbers, anything else rounded, one scale for each output."""
    stored = source.quantised(Fp8Weight)
    if stored is not None:
        return stored
    if part == HEAD:
        return int8_weight(source, part, target)
    return _rounded(source, part, target.errors, to_fp8)


NATIVE = "auto", "native"


def unbalanced(part: str) -> None:
    """No factors: inputs count alike."""
    return


def weight_format(
    name: str, kernels: Kernels, dtype: torch.dtype, device: torch.device, balance: Balance = unbalanced
) -> WeightFormat:
    """The format of a `model.weights` value; `auto` is native where no measurement chose. Raises ModelError.

    `balance` is asked only where 8-bit weights are made that are turned.
    """
    if name in QUANTISED:
        return QuantisedFormat(kernels, dtype, device, QUANTISED[name], balance)
    if name not in NATIVE:
        raise ModelError(f"model.weights: must be one of {', '.join([*NATIVE, *QUANTISED])}, got {name!r}")
    return DenseFormat(kernels, dtype, device)


def _rounded(
    source: TensorSource, part: str, rounding: RoundingError, quantise: Callable[[Tensor], QuantisedWeight]
) -> Stored:
    kind, weights = part.rpartition(".")[2], []
    for values in source.float_rows():
        weights.append(quantise(values))
        rounding.add(kind, values, weights[-1].values())
    return Stored(stacked(weights))


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """Numbers of 8 or 4 bits; `quantise` says what each tensor becomes."""

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    quantise: "Quantise"
    balance: Balance
    errors: RoundingError = field(default_factory=RoundingError)

    def builder(self, part: str, outputs: int, inputs: int, has_bias: bool) -> "QuantisedBuilder":
        return QuantisedBuilder(self, part, outputs, torch.zeros(outputs, device=self.device) if has_bias else None)

    def rounding(self) -> dict[str, float]:
        errors = self.errors.relative()
        if errors:
            listed = ", ".join(f"{kind} {error:.2%}" for kind, error in errors.items())
            log.info("weights rounded at load, error relative to the weights (RMS): %s", listed)
        return errors


Quantise = Callable[[TensorSource, str, QuantisedFormat], Stored]
QUANTISED: dict[str, Quantise] = {"int8": int8_model_weight, "int4": int4_weight, "fp8": fp8_weight}


class QuantisedBuilder:
    """Collects the projections of a linear, and packs them as soon as all of them are there."""

    def __init__(self, target: QuantisedFormat, part: str, outputs: int, bias: Tensor | None) -> None:
        self._target = target
        self._part = part
        self._missing = outputs
        self._weights: dict[int, Stored] = {}
        self._bias = bias
        self._linears: list[QuantisedLinear] = []

    def weight(self, row: int, source: TensorSource) -> None:
        target = self._target
        self._weights[row] = target.quantise(source, self._part, target)
        self._missing -= source.shape[0]
        if not self._missing:
            self._pack()

    def bias(self, row: int, source: TensorSource) -> None:
        if self._bias is None:
            raise ValueError("this linear was built without a bias")
        source.copy_to(self._bias[row : row + source.shape[0]])

    def finish(self) -> Linear:
        return self._linears[0] if len(self._linears) == 1 else SideBySide(self._linears)

    def _pack(self) -> None:
        weights = [self._weights[row] for row in sorted(self._weights)]
        self._weights.clear()
        row = 0
        for _, alike in groupby(weights, key=_layout):
            same = list(alike)
            weight = placed(stacked([stored.weight for stored in same]), self._target.device)
            order = same[0].order if same[0].order is None else same[0].order.to(self._target.device)
            self._linears.append(self._linear(row, weight, order))
            row += weight.shape[0]

    def _linear(self, row: int, weight: QuantisedWeight, order: Tensor | None) -> QuantisedLinear:
        kernels, dtype = self._target.kernels, self._target.dtype
        bias = None if self._bias is None else self._bias[row : row + weight.shape[0]]
        result = torch.float32 if self._part == HEAD else dtype
        if isinstance(weight, Int8Weight):
            return QuantisedLinear(kernels, kernels.linear_int8, kernels.pack_int8(weight), bias, order, dtype, result)
        if isinstance(weight, Fp8Weight):
            return QuantisedLinear(kernels, kernels.linear_fp8, kernels.pack_fp8(weight), bias, order, dtype, result)
        return QuantisedLinear(kernels, kernels.linear_int4, kernels.pack_int4(weight), bias, order, dtype, result)


def placed(weight: QuantisedWeight, device: torch.device) -> QuantisedWeight:
    """The weight on the device where it will be packed."""
    tensors: dict[str, Any] = {name: value.to(device) for name, value in _fields(weight) if isinstance(value, Tensor)}
    return replace(weight, **tensors)


def _fields(weight: QuantisedWeight) -> list[tuple[str, object]]:
    return [(one.name, getattr(weight, one.name)) for one in fields(weight)]


def _layout(stored: Stored) -> tuple[object, ...]:
    """Weights that agree in this can be one."""
    weight, order = stored.weight, None if stored.order is None else stored.order.tolist()
    turned = isinstance(weight, Int8Weight) and weight.turned
    return order, type(weight), weight.group, weight.shape[1], weight.scale.dtype, weight.minimum is None, turned
