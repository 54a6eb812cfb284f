"""Making codes of vectors and vectors of codes in plain PyTorch: the definition of every format.

Knows single vectors in the last dimension, not pages, slots or heads. The steps are float32 in this order, so that a
faster version can be equal bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hadamard import hadamard
from . import FORMATS, GROUP, KVFormat, turn_width

LARGEST = 2.0**126
SMALLEST = 2.0**-100
HIGHEST = {"fp8": 448.0, "int8": 127.0, "int4": 15.0}  # code


@dataclass(frozen=True, slots=True)
class Codec:
    """encode: [..., D] float32 -> codes [..., W], scales [..., S]. decode: those and D -> [..., D]."""

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor, int], Tensor]


def encode(format: KVFormat, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., W] and scales [..., S] of vectors [..., D] of any float dtype."""
    if not format.scaled:
        return vectors.to(format.dtype), torch.empty(*vectors.shape[:-1], 0, device=vectors.device)
    return CODECS[format.name].encode(vectors.float())


def decode(format: KVFormat, codes: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    """[..., D]: float32 where the format has scales, else the dtype of the codes."""
    return CODECS[format.name].decode(codes, scales, head_dim) if format.scaled else codes


def turn(vectors: Tensor) -> Tensor:
    """[..., D] float32 times the Hadamard matrix of each block of p elements. Turning twice gives the vectors back."""
    return hadamard(vectors, turn_width(vectors.shape[-1]))


def _scale(extent: Tensor, highest: float) -> tuple[Tensor, Tensor]:
    """The scale that spreads codes over the extent, and the factor that makes codes. NaN extents stay NaN."""
    scale = torch.where(extent < SMALLEST, 0.0, extent / highest)
    return scale, torch.where(scale == 0, 0.0, scale.reciprocal())


def _encode_symmetric(name: str, vectors: Tensor) -> tuple[Tensor, Tensor]:
    highest = HIGHEST[name]
    largest = vectors.abs().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest.clamp(max=LARGEST), torch.nan)
    scale, factor = _scale(largest, highest)
    steps = torch.where(factor > 0, (vectors * factor).clamp(-highest, highest), 0.0)
    return (steps.round() if name == "int8" else steps).to(FORMATS[name].dtype), scale


def _decode_symmetric(codes: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    return codes.float() * scales


def _encode_int4(vectors: Tensor) -> tuple[Tensor, Tensor]:
    head_dim = vectors.shape[-1]
    parts, scales, leasts = [], [], []
    for group in torch.split(vectors, GROUP, -1):
        finite = group.isfinite().all(-1, keepdim=True)
        inside = group.clamp(-LARGEST, LARGEST)
        least = torch.where(finite, inside.amin(-1, keepdim=True), torch.nan)
        scale, factor = _scale(inside.amax(-1, keepdim=True) - least, HIGHEST["int4"])
        steps = ((inside - least) * factor).clamp(0, HIGHEST["int4"]).round()
        parts.append(torch.where(factor > 0, steps, 0.0))
        scales.append(scale)
        leasts.append(least)
    codes = torch.cat(parts, -1).to(torch.uint8)
    width = FORMATS["int4"].width(head_dim)
    low, high = codes[..., :width], torch.nn.functional.pad(codes[..., width:], (0, 2 * width - head_dim))
    return low | (high << 4), torch.cat((*scales, *leasts), -1)


def _decode_int4(codes: Tensor, scales: Tensor, head_dim: int) -> Tensor:
    steps = torch.cat((codes & 15, codes >> 4), -1)[..., :head_dim].float()
    group = torch.arange(head_dim, device=codes.device) // GROUP
    scale, least = (part.index_select(-1, group) for part in scales.chunk(2, -1))
    return steps * scale + least


CODECS: Mapping[str, Codec] = {
    "fp8": Codec(lambda vectors: _encode_symmetric("fp8", vectors), _decode_symmetric),
    "int8": Codec(lambda vectors: _encode_symmetric("int8", vectors), _decode_symmetric),
    "int4": Codec(_encode_int4, _decode_int4),
}
