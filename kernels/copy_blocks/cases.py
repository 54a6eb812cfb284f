"""Cases of copying KV blocks: sources that are copied twice, blocks of odd sizes, pages of numbers and of codes."""

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, generator, normal

Sizes = tuple[int, int, int, int, int, int]


def run(kernels: Kernels, stored: Tensor, pairs: Tensor) -> Results:
    out = stored.clone()
    kernels.copy_blocks(out, pairs)
    return (out,)


def expected(stored: Tensor, pairs: Tensor) -> Results:
    """Every block from where it was, or from the source of its copy."""
    source = torch.arange(stored.shape[3])
    source[pairs[:, 1]] = pairs[:, 0]
    return (stored.index_select(3, source),)


def _case(name: str, sizes: Sizes, pairs: list[tuple[int, int]], *, codes: bool = False) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        numbers = torch.randint(-128, 128, sizes, generator=generator(1), dtype=torch.int8)
        stored = numbers if codes else normal(sizes, dtype, 1)
        return stored, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)

    layers, sides, heads, _, *block = sizes
    moved = 2 * len(pairs) * layers * sides * heads * block[0] * block[1]
    return Case(name, make, **{"bytes" if codes else "elements": moved})


OP = Op(
    name="copy_blocks",
    run=run,
    expected=expected,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    cases=(
        _case("none", (1, 2, 1, 3, 4, 16), []),
        _case("one", (1, 2, 2, 3, 4, 16), [(2, 0)]),
        _case("a source twice", (2, 2, 3, 7, 4, 10), [(5, 1), (5, 2), (0, 6)]),
        _case("odd blocks", (2, 2, 3, 5, 1, 5), [(4, 0), (1, 3)]),
        _case("odd blocks of codes", (2, 2, 3, 5, 1, 5), [(4, 0), (1, 3)], codes=True),
        _case("blocks of many pieces", (1, 2, 2, 4, 16, 144), [(3, 0), (1, 2)]),
    ),
)
