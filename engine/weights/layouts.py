"""How each format packs a linear: the pieces of a module, and the weight they amount to (models.md §7).

Knows GPTQ, AWQ, compressed-tensors and FP8 checkpoints; values equal the format's definition bit for bit in float32.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.linear_fp8 import NAN_CODE, Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight, packed
from batchgen.kernels.linear_int8 import Int8Weight

from .expand import powers_of_two
from .repack import QuantisedWeight, Stored, in_half
from .schemes import Scheme

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output 8c + _AWQ_ORDER[i]
Pieces = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces of a module: names, which of them has the codes and which may have the scales, what they come to.

    `unused`: pieces that say how activations were rounded, which this package does its own way. `doubt`: what other
    programs read in another way, in words.
    """

    codes: str
    scale: tuple[str, ...]
    pieces: tuple[str, ...]
    shape: Callable[[tuple[int, ...], Scheme], tuple[int, int]]  # of the codes -> (outputs, inputs)
    unpack: Callable[[Pieces, Scheme], Stored]
    unused: tuple[str, ...] = ()
    doubt: Callable[[Pieces, Scheme], str | None] = lambda pieces, scheme: None

    def scale_of(self, module: str, stored: Container[str]) -> str | None:
        """The name of a module's scales; None for one that is not packed."""
        return next((name for piece in self.scale if (name := f"{module}.{piece}") in stored), None)


def _gptq(pieces: Pieces, scheme: Scheme) -> Stored:
    codes = _along_first(pieces["qweight"], scheme.bits).T  # [N, K]
    zeros = _along_last(pieces["qzeros"], scheme.bits).T  # [N, groups]
    if scheme.method == "gptq":
        zeros = (zeros + 1) & (2**scheme.bits - 1)
    return _grouped(codes, pieces["scales"].T, zeros, scheme, pieces.get("g_idx"))


def _gptq_doubt(pieces: Pieces, scheme: Scheme) -> str | None:
    limit = 2**scheme.bits - 1
    if scheme.method == "gptq" and bool((_along_last(pieces["qzeros"], scheme.bits) == limit).any()):
        return f"a zero point is stored as {limit}, which is read as 0 here and as {limit + 1} elsewhere"
    return None


def _awq(pieces: Pieces, scheme: Scheme) -> Stored:
    codes, zeros = (_along_last(pieces[name], 4)[:, _awq_columns(pieces[name])] for name in ("qweight", "qzeros"))
    return _grouped(codes.T, pieces["scales"].T, zeros.T, scheme, None)


def _awq_columns(words: Tensor) -> Tensor:
    """Where outputs 0, 1, 2, ... stand among the nibbles."""
    inverse = torch.tensor(_AWQ_ORDER).argsort()
    return (torch.arange(words.shape[1]).unsqueeze(1) * 8 + inverse).flatten()


def _pack_quantized(pieces: Pieces, scheme: Scheme) -> Stored:
    codes, scale = _along_last(pieces["weight_packed"], scheme.bits), pieces["weight_scale"]
    if "weight_shape" in pieces and pieces["weight_shape"].tolist() != list(codes.shape):
        raise ValueError(f"weight_shape says {pieces['weight_shape'].tolist()}, the codes {list(codes.shape)}")
    if scheme.symmetric:
        zeros = torch.full(scale.shape, 2 ** (scheme.bits - 1))
        _require_no_zeros(pieces, scheme)
    else:
        zeros = _along_first(pieces["weight_zero_point"], scheme.bits)[: len(codes)]
    return _grouped(codes, scale, zeros, scheme, pieces.get("weight_g_idx"))


def _require_no_zeros(pieces: Pieces, scheme: Scheme) -> None:
    """Zero points that a symmetric scheme has no use for say nothing: plain zeros, or the middle code packed."""
    stored = pieces.get("weight_zero_point")
    if stored is None or not bool(stored.any()):
        return
    if stored.dtype != torch.int32 or bool((_numbers(stored, scheme.bits) != 2 ** (scheme.bits - 1)).any()):
        raise ValueError("the config calls it symmetric, yet its weight_zero_point shifts it")


def _int_quantized(pieces: Pieces, scheme: Scheme) -> Stored:
    codes, scale = pieces["weight"], pieces["weight_scale"].float().reshape(-1, 1)
    if codes.dtype != torch.int8 or len(scale) not in (1, len(codes)):
        raise ValueError(f"weight is {codes.dtype}, with {len(scale)} scales for {len(codes)} outputs")
    return Stored(Int8Weight(codes.contiguous(), scale.expand(len(codes), 1).contiguous(), None, codes.shape[1]))


def _float_quantized(pieces: Pieces, scheme: Scheme) -> Stored:
    codes = pieces["weight"]
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight is {codes.dtype}, not float8_e4m3fn")
    if bool(((codes.view(torch.uint8) & NAN_CODE) == NAN_CODE).any()):
        raise ValueError("there is a NaN among the weights")
    scale = next(pieces[name] for name in _FLOAT_SCALES if name in pieces)
    if scale.dtype == torch.uint8:
        scale = powers_of_two(scale)
    spread, group = _spread(scale.float(), codes.shape, scheme.block)
    return Stored(Fp8Weight(codes, spread, group))


def _spread(scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None) -> tuple[Tensor, int]:
    """Scales of a tensor, of outputs or of blocks -> [outputs, groups] and the inputs of a group."""
    outputs, inputs = shape
    if block is None:
        if scale.numel() not in (1, outputs):
            raise ValueError(f"{list(scale.shape)} scales for {outputs} outputs")
        return scale.reshape(-1, 1).expand(outputs, 1).contiguous(), inputs
    rows, columns = block
    if tuple(scale.shape) != (-(-outputs // rows), -(-inputs // columns)):
        raise ValueError(f"{list(scale.shape)} scales for {[outputs, inputs]} in blocks of {list(block)}")
    return scale.repeat_interleave(rows, 0)[:outputs].contiguous(), columns


def _along_first(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> [A * 32 / bits, B]: the numbers of a word lie one below the other."""
    return _numbers(words, bits).movedim(-1, 1).reshape(-1, words.shape[1])


def _along_last(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> [A, B * 32 / bits]: the numbers of a word lie side by side."""
    return _numbers(words, bits).flatten(1)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int32 [A, B] -> [A, B, 32 / bits], lowest bits first."""
    if words.dtype != torch.int32:
        raise ValueError(f"words are {words.dtype}, not int32")
    shifted: Tensor = words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = shifted & (2**bits - 1)
    return numbers


def _grouped(codes: Tensor, scale: Tensor, zeros: Tensor, scheme: Scheme, index: Tensor | None) -> Stored:
    """codes [N, K], scale and zeros [N, groups]: value = scale * (code - zero), groups by `index` [K] where given."""
    if not scale.is_floating_point():
        raise ValueError(f"scales are {scale.dtype}, no floats")
    inputs = codes.shape[1]
    group = inputs if scheme.group == -1 else scheme.group
    if scale.shape != (len(codes), -(-inputs // group)) or zeros.shape != scale.shape:
        raise ValueError(
            f"scales {list(scale.shape)} and zero points {list(zeros.shape)} for {list(codes.shape)}, group {group}"
        )
    if index is None and scheme.reordered and group < inputs:
        raise ValueError("the config says inputs are in the order of their activations, yet its g_idx is missing")
    order = None if index is None else _order(index, inputs, group)
    if order is not None:
        codes = codes[:, order]
    scale = scale.float().contiguous()
    if scheme.bits == 4:
        return Stored(_int4(codes, scale, zeros, group), order)
    short, minimum = in_half(scale, scale * (128 - zeros) if bool((zeros != 128).any()) else None)
    return Stored(Int8Weight((codes - 128).to(torch.int8).contiguous(), short, minimum, group), order)


def _int4(codes: Tensor, scale: Tensor, zeros: Tensor, group: int) -> QuantisedWeight:
    if codes.shape[1] % 2:
        raise ValueError(f"{codes.shape[1]} inputs, an odd number")
    short, minimum = in_half(scale, -scale * zeros)
    assert minimum is not None
    return Int4Weight(packed(codes).contiguous(), short, minimum, group)


def _order(index: Tensor, inputs: int, group: int) -> Tensor | None:
    """The inputs sorted by group; None where they already are. Raises ValueError for groups of other sizes."""
    if tuple(index.shape) != (inputs,):
        raise ValueError(f"g_idx is {list(index.shape)}, for {inputs} inputs")
    expected = torch.arange(len(index)) // group
    order = index.long().argsort(stable=True)
    if not torch.equal(index.long()[order], expected):
        raise ValueError(f"g_idx does not put {group} inputs into every group")
    return None if torch.equal(index.long(), expected) else order


def _first_packed(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, int]:
    return shape[1], shape[0] * 32 // scheme.bits


_FLOAT_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")


def _same(shape: tuple[int, ...], scheme: Scheme) -> tuple[int, int]:
    return shape[0], shape[1]


_GPTQ = Layout(
    "qweight", ("scales",), ("qweight", "qzeros", "scales", "g_idx"), _first_packed, _gptq, doubt=_gptq_doubt
)
_FLOAT = Layout("weight", _FLOAT_SCALES, ("weight", *_FLOAT_SCALES), _same, _float_quantized, _INPUT_SCALES)
LAYOUTS = {
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": Layout(
        "qweight", ("scales",), ("qweight", "qzeros", "scales"), lambda shape, scheme: (shape[1] * 8, shape[0]), _awq
    ),
    "pack-quantized": Layout(
        "weight_packed",
        ("weight_scale",),
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        lambda shape, scheme: (shape[0], shape[1] * 32 // scheme.bits),
        _pack_quantized,
    ),
    "int-quantized": Layout(
        "weight", ("weight_scale",), ("weight", "weight_scale"), _same, _int_quantized, _INPUT_SCALES
    ),
    "float-quantized": _FLOAT,
    "fp8": _FLOAT,
}
