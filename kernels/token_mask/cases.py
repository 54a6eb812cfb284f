"""Cases of the token mask: words of one kind and mixed ones, heads wider and narrower than the mask."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, generator, normal


def expected(logits: Tensor, rows: Tensor, bits: Tensor) -> Results:
    out = logits.clone()
    for row, words in zip(rows.tolist(), bits.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if token >= 32 * len(words) or not (words[token // 32] >> (token % 32)) & 1:
                out[row, token] = -torch.inf
    return (out,)


def _run(kernels: Kernels, logits: Tensor, rows: Tensor, bits: Tensor) -> Results:
    out = logits.clone()
    kernels.mask(out, rows, bits)
    return (out,)


def _case(name: str, rows: int, vocabulary: int, words: int, masked: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        chosen = torch.randperm(rows, generator=generator(1))[:masked]
        bits = torch.randint(-(2**31), 2**31, (masked, words), generator=generator(2)).to(torch.int32)
        bits[:, ::3], bits[:, 1::3] = 0, -1
        return normal((rows, vocabulary), torch.float32, 3), chosen, bits

    return Case(name, make, elements=masked * vocabulary, bytes=4 * masked * words)


OP = Op(
    name="mask",
    run=_run,
    expected=expected,
    tolerance={torch.float32: 0.0},
    cases=(
        _case("some rows", 7, 301, 10, 4),
        _case("every row", 3, 320, 10, 3),
        _case("head wider than the mask", 3, 401, 9, 2),
        _case("head narrower than the mask", 3, 130, 9, 3),
        _case("no row", 2, 64, 2, 0),
        _case("one token", 1, 1, 1, 1),
    ),
)
