"""Cases of rotary encoding with the KV write. Pages start as NaN: a slot written by mistake shows, one left out too."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, generator, normal
from ..kv_format import FORMATS, LayerPages, Pages
from ..kv_format.cases import BY_DTYPE, empty_pages
from .reference import rotate_write

QUANTISED = ("fp8", "int8", "int4")
Angles = Callable[[int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Size:
    tokens: int
    heads: int
    kv_heads: int
    width: int
    half: int
    num_blocks: int
    block_size: int = 16


def run(kernels: Kernels, *arguments: object) -> Results:
    *heads, cos, sin, slots, pages = arguments
    written = _copied(pages)
    query = kernels.rotate_write(*heads, cos, sin, slots, written)
    return query, *_numbers(written)


def expected(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: LayerPages
) -> Results:
    """Each pair as a complex number times cos + i sin; row by row into pages that hold the numbers themselves."""
    written = LayerPages(*(_plain(side, side.codes.double()) for side in (pages.keys, pages.values)))
    turned = _turned(key, cos, sin)
    for row, slot in enumerate(slots.tolist()):
        for source, to in ((turned, written.keys), (value, written.values)):
            to.codes[:, slot // pages.block_size, slot % pages.block_size] = source[row].double()
    return _turned(query, cos, sin), written.keys.codes, written.values.codes


def run_bits(kernels: Kernels, *arguments: object) -> Results:
    *heads, cos, sin, slots, pages = arguments
    written = _copied(pages)
    query = kernels.rotate_write(*heads, cos, sin, slots, written)
    return query, *_bits(written)


def by_reference(*arguments: object) -> Results:
    *heads, cos, sin, slots, pages = arguments
    written = _copied(pages)
    query = rotate_write(*heads, cos, sin, slots, written)
    return query, *_bits(written)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, wide = cos.shape[-1], x.double()
    turn = torch.complex(cos.to(x.dtype).double(), sin.to(x.dtype).double()).unsqueeze(1)
    pairs = torch.complex(wide[..., :half].contiguous(), wide[..., half : 2 * half].contiguous()) * turn
    return torch.cat([pairs.real, pairs.imag, wide[..., 2 * half :]], -1)


def _plain(pages: Pages, codes: Tensor) -> Pages:
    return replace(pages, codes=codes)


def _copied(pages: LayerPages) -> LayerPages:
    sides = (pages.keys, pages.values)
    return LayerPages(*(replace(side, codes=side.codes.clone(), scales=side.scales.clone()) for side in sides))


def _numbers(pages: LayerPages) -> Results:
    return pages.keys.codes, pages.values.codes


def _bits(pages: LayerPages) -> Results:
    """Every bit of the pages as whole numbers; the sign of a zero and what makes up a NaN do not count."""
    sides = (pages.keys, pages.values)
    codes = (side.codes if side.format.scaled else side.codes.nan_to_num(nan=7.0) + 0.0 for side in sides)
    scales = ((side.scales.nan_to_num(nan=-7.0) + 0.0).view(torch.int32) for side in sides)
    return (*(part.view(torch.uint8) for part in codes), *scales)


def any_angle(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    angle = normal((tokens, half), torch.float32, 2, 3.0)
    return angle.cos(), angle.sin()


def no_turn(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    return torch.ones(tokens, half), torch.zeros(tokens, half)


def quarters(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    """Quarters of a turn: nothing is rounded, whatever the order of products and sums."""
    quarter = torch.randint(0, 4, (tokens, half), generator=generator(2))
    table = torch.tensor([1.0, 0.0, -1.0, 0.0, 1.0])
    return table[quarter], table[quarter + 1]


def _case(
    name: str,
    size: Size,
    formats: tuple[str, str] | None = None,
    angles: Angles = any_angle,
    vary: Callable[[Tensor], Tensor] = lambda heads: heads,
) -> Case:
    """formats: of keys and values; None: the dtype's own."""
    total = size.heads + 2 * size.kv_heads

    def make(dtype: torch.dtype) -> Arguments:
        packed = vary(normal((size.tokens, total, size.width), dtype, 1))  # as a joint projection leaves them
        heads = packed.split_with_sizes([size.heads, size.kv_heads, size.kv_heads], 1)
        slots = torch.randperm(size.num_blocks * size.block_size, generator=generator(3))[: size.tokens]
        kinds = [FORMATS[name] for name in formats] if formats else [BY_DTYPE[dtype]] * 2
        rows = (size.kv_heads, size.num_blocks, size.block_size, size.width)
        pages = LayerPages(*(empty_pages(kind, *rows) for kind in kinds))
        return *heads, *angles(size.tokens, size.half), slots, pages

    title = name if formats is None else f"{name}, {formats[0]} keys and {formats[1]} values"
    turned = size.tokens * (size.heads + size.kv_heads) * size.width
    return Case(title, make, elements=2 * size.tokens * total * size.width, operations=3 * turned)


def _varied(vectors: Tensor) -> Tensor:
    """Sizes over many orders, zeros, a constant, an outlier, and numbers at the ends of what bfloat16 holds."""
    scales = torch.logspace(-20, 20, vectors[..., 0].numel()).view(vectors.shape[:-1]).to(vectors.dtype)
    vectors = vectors * scales.unsqueeze(-1)
    for index, made in enumerate((0.0, 7.25, 2e-38, 3e38, torch.nan, -torch.inf)):
        vectors.view(-1, vectors.shape[-1])[index + 2 :: 11, : None if abs(made) < 1e30 else 1] = made
    return vectors


def coded(name: str, size: Size, keys: str, values: str) -> Case:
    """Odd numbers turned by quarters, so that every bit of the pages can be compared."""
    return _case(name, size, (keys, values), quarters, _varied)


STEP = Size(2048, 9, 3, 64, 32, 600)
ODD = Size(37, 7, 5, 20, 10, 7)
OP = Op(
    name="rotate_write",
    run=run,
    expected=expected,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 1.2e-2},
    cases=(
        _case("one token", Size(1, 9, 3, 64, 32, 2, 8)),
        _case("odd counts", ODD),
        _case("every slot", Size(64, 1, 1, 33, 16, 2, 32)),
        _case("half of the head turns", Size(11, 4, 2, 64, 16, 3)),
        _case("a step", STEP),
    ),
)
FORMATS_OP = Op(
    name="rotate_write",
    run=run_bits,
    expected=by_reference,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    cases=(
        *(
            coded(f"heads of {width}", Size(37, 5, 5, width, width // 2, 7), name, name)
            for name in QUANTISED
            for width in (33, 80, 128)
        ),
        *(coded("a step", STEP, name, name) for name in QUANTISED),
        coded("plain", ODD, "float32", "float32"),
        coded("plain", ODD, "bfloat16", "bfloat16"),
        coded("mixed", ODD, "float32", "int4"),
        coded("mixed", ODD, "int4", "float32"),
        coded("mixed", ODD, "int8", "fp8"),
    ),
)
