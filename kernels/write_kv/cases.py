"""Cases of the KV write. Pages start as NaN: a slot written by mistake and one left out both show."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, generator, normal


def run(kernels: Kernels, key: Tensor, value: Tensor, slots: Tensor, key_pages: Tensor, value_pages: Tensor) -> Results:
    key_pages, value_pages = key_pages.clone(), value_pages.clone()
    kernels.write_kv(key, value, slots, key_pages, value_pages)
    return key_pages, value_pages


def expected(key: Tensor, value: Tensor, slots: Tensor, key_pages: Tensor, value_pages: Tensor) -> Results:
    block_size = key_pages.shape[2]
    out = []
    for source, pages in ((key, key_pages), (value, value_pages)):
        written = pages.clone()
        for row, slot in enumerate(slots.tolist()):
            written[:, slot // block_size, slot % block_size] = source[row]
        out.append(written)
    return tuple(out)


def _case(name: str, tokens: int, heads: int, blocks: int, block_size: int, width: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        packed = normal((tokens, 3, heads, width), dtype, 1)
        slots = torch.randperm(blocks * block_size, generator=generator(2))[:tokens]
        pages = torch.full((heads, blocks, block_size, width), torch.nan, dtype=dtype)
        return packed[:, 1], packed[:, 2], slots, pages, pages.clone()

    return Case(name, make, elements=4 * tokens * heads * width)


OP = Op(
    name="write_kv",
    run=run,
    expected=expected,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    cases=(
        _case("one token", 1, 3, 2, 8, 64),
        _case("odd counts", 37, 5, 7, 16, 20),
        _case("every slot", 64, 1, 2, 32, 33),
        _case("a step", 2048, 3, 600, 16, 64),
    ),
)
