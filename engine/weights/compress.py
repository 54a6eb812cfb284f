"""A checkpoint's linears in the pieces of compressed-tensors: what each becomes, and the settings that say so.

Knows the formats int4 (pack-quantized), int8 (int-quantized) and fp8 (float-quantized), models.md §7; writes no file.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight
from batchgen.kernels.linear_int8 import Int8Weight

from ..spec import ModelError
from .quantise import GROUPS, RoundingError, to_fp8, to_int8, to_symmetric_int4
from .tensors import TensorSource

Pieces = dict[str, Tensor]
_WORD = 8  # nibbles of an int32


@dataclass(frozen=True, slots=True)
class Compression:
    """`weights`: int4, int8 or fp8; `group`: inputs of a scale of int4; `dtype`: of the scales."""

    weights: str
    group: int
    dtype: torch.dtype

    def pieces(self, source: TensorSource, kind: str, rounding: RoundingError) -> Pieces:
        """The tensors of a module, by the ending of their names; codes that the source has already are kept."""
        return _PIECES[self.weights](self, source, kind, rounding)

    def settings(self, plain: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config` of the checkpoint; the modules `plain` are left as they were."""
        layout, weights, activations = _SETTINGS[self.weights]
        group: dict[str, Any] = {"strategy": "group", "group_size": self.group} if self.weights == "int4" else {}
        described = {**weights, "dynamic": False, "strategy": "channel", "group_size": None, **group}
        groups = {"targets": ["Linear"], "weights": described, "input_activations": activations, "format": layout}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": groups},
            "ignore": sorted(plain),
        }


def compression(weights: str, group: int | None, inputs: set[int], dtype: torch.dtype) -> Compression:
    """For linears of these numbers of inputs. Raises ModelError when no group size fits them all."""
    sizes = GROUPS if group is None else (group,)
    fits = [size for size in sizes if all(number % size == 0 for number in inputs)]
    if weights == "int4" and (not fits or fits[0] % 2 or any(number % _WORD for number in inputs)):
        wanted = f"groups of {group}" if group else "groups of 128, 64 or 32"
        raise ModelError(
            f"int4: linears with {', '.join(map(str, sorted(inputs)))} inputs cannot be cut into {wanted}; "
            "try another --group, or --weights int8"
        )
    return Compression(weights, fits[0] if fits else 0, dtype)


def _int4(self: Compression, source: TensorSource, kind: str, rounding: RoundingError) -> Pieces:
    kept = _kept_int4(self, source)
    if kept is None:
        parts = []
        for values in source.float_rows():
            codes, scale = to_symmetric_int4(values, self.group, self.dtype)
            rounding.add(kind, values, (codes - 8) * scale.repeat_interleave(self.group, 1))
            parts.append((codes.to(torch.uint8), scale))
        kept = torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts])
    codes, scale = kept
    return {
        "weight_packed": words(codes),
        "weight_scale": scale.to(self.dtype),
        "weight_shape": torch.tensor(codes.shape),
    }


def _kept_int4(self: Compression, source: TensorSource) -> tuple[Tensor, Tensor] | None:
    """Codes and scales of a source that has 4-bit codes around 8 in the same groups."""
    stored = source.quantised(Int4Weight)
    if stored is None or stored.order is not None or not isinstance(stored.weight, Int4Weight):
        return None
    weight, scale = stored.weight, stored.weight.scale.float()
    symmetric = torch.equal(scale * -8, weight.minimum.float())
    if weight.group != self.group or not symmetric or not torch.equal(scale.to(self.dtype).float(), scale):
        return None
    return weight.codes(), scale


def _by_output(
    kept: type[Int8Weight] | type[Fp8Weight], quantise: Callable[[Tensor, torch.dtype], Int8Weight | Fp8Weight]
) -> Callable[[Compression, TensorSource, str, RoundingError], Pieces]:
    def pieces(self: Compression, source: TensorSource, kind: str, rounding: RoundingError) -> Pieces:
        stored = source.quantised(kept)
        if stored is not None and isinstance(stored.weight, kept) and _is_by_output(stored.weight, self.dtype):
            return {"weight": stored.weight.q, "weight_scale": stored.weight.scale.to(self.dtype)}
        parts = []
        for values in source.float_rows():
            parts.append(quantise(values, self.dtype))
            rounding.add(kind, values, parts[-1].values())
        scale = torch.cat([part.scale for part in parts])
        return {"weight": torch.cat([part.q for part in parts]), "weight_scale": scale.to(self.dtype)}

    return pieces


def _is_by_output(weight: Int8Weight | Fp8Weight, dtype: torch.dtype) -> bool:
    exact = torch.equal(weight.scale.to(dtype).float(), weight.scale.float())
    return weight.scale.shape[1] == 1 and weight.minimum is None and exact


def words(codes: Tensor) -> Tensor:
    """[A, B] numbers 0 .. 15 -> int32 [A, ceil(B / 8)], the first in the lowest bits; what is missing is zero."""
    filled = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % _WORD))
    shifted = filled.view(len(codes), -1, _WORD) << torch.arange(0, 32, 4)
    packed: Tensor = shifted.sum(-1).to(torch.int32)
    return packed


_PIECES: Mapping[str, Callable[[Compression, TensorSource, str, RoundingError], Pieces]] = {
    "int4": _int4,
    "int8": _by_output(Int8Weight, to_int8),
    "fp8": _by_output(Fp8Weight, to_fp8),
}
_BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_SETTINGS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True}, None),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True}, _BY_TOKEN),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True}, None),
}
FORMATS = tuple(_PIECES)
