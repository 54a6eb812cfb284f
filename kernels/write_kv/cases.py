"""Cases of the KV write. Pages start as NaN: a slot written by mistake and one left out both show."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, generator, normal
from ..kv_format import FORMATS, LayerPages, Pages
from ..kv_format.cases import BY_DTYPE, empty_pages
from .reference import write_kv

QUANTISED = ("fp8", "int8", "int4")


def run(kernels: Kernels, key: Tensor, value: Tensor, slots: Tensor, pages: LayerPages) -> Results:
    written = LayerPages(_copy(pages.keys), _copy(pages.values))
    kernels.write_kv(key, value, slots, written)
    return _contents(written)


def expected(key: Tensor, value: Tensor, slots: Tensor, pages: LayerPages) -> Results:
    """Row by row where the numbers themselves are stored."""
    written = LayerPages(_copy(pages.keys), _copy(pages.values))
    for row, slot in enumerate(slots.tolist()):
        for source, to in ((key, written.keys), (value, written.values)):
            to.codes[:, slot // pages.block_size, slot % pages.block_size] = source[row]
    return _contents(written)


def by_reference(key: Tensor, value: Tensor, slots: Tensor, pages: LayerPages) -> Results:
    written = LayerPages(_copy(pages.keys), _copy(pages.values))
    write_kv(key, value, slots, written)
    return _contents(written)


def _copy(pages: Pages) -> Pages:
    return replace(pages, codes=pages.codes.clone(), scales=pages.scales.clone())


def _contents(pages: LayerPages) -> Results:
    """Every bit of the pages as whole numbers."""
    sides = (pages.keys, pages.values)
    return (*(side.codes.view(torch.uint8) for side in sides), *(side.scales.view(torch.int32) for side in sides))


def _case(shape: str, size: tuple[int, int, int, int, int], names: tuple[str, str] | None = None) -> Case:
    """size: tokens, heads, blocks, block size, width. names: formats of keys and values; None: the dtype's own."""
    tokens, heads, blocks, block_size, width = size

    def make(dtype: torch.dtype) -> Arguments:
        packed = _varied(normal((tokens, 3, heads, width), dtype, 1))
        slots = torch.randperm(blocks * block_size, generator=generator(2))[:tokens]
        formats = [FORMATS[name] for name in names] if names else [BY_DTYPE[dtype]] * 2
        pages = LayerPages(*(empty_pages(format, heads, blocks, block_size, width) for format in formats))
        return packed[:, 1], packed[:, 2], slots, pages

    title = shape if names is None else f"{shape}, {names[0]} keys and {names[1]} values"
    return Case(title, make, elements=(4 if names is None else 2) * tokens * heads * width)


def _varied(vectors: Tensor) -> Tensor:
    """Sizes over many orders, zeros, a constant, an outlier, and numbers at the ends of float32."""
    scales = torch.logspace(-20, 20, vectors[..., 0].numel()).view(vectors.shape[:-1]).to(vectors.dtype)
    vectors = vectors * scales.unsqueeze(-1)
    for index, made in enumerate((0.0, 7.25, 1e-38, 3e38, torch.nan, -torch.inf)):
        vectors.view(-1, vectors.shape[-1])[index + 2 :: 11, : None if abs(made) < 1e30 else 1] = made
    return vectors


ODD = (37, 5, 7, 16, 20)
OP = Op(
    name="write_kv",
    run=run,
    expected=expected,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    cases=(
        _case("one token", (1, 3, 2, 8, 64)),
        _case("odd counts", ODD),
        _case("every slot", (64, 1, 2, 32, 33)),
        _case("a step", (2048, 3, 600, 16, 64)),
    ),
)
FORMATS_OP = Op(
    name="write_kv",
    run=run,
    expected=by_reference,
    tolerance=OP.tolerance,
    cases=(
        *(
            _case(f"heads of {width}", (37, 5, 7, 16, width), (name, name))
            for name in QUANTISED
            for width in (33, 80, 128)
        ),
        *(_case("a step", (2048, 3, 600, 16, 64), (name, name)) for name in QUANTISED),
        _case("mixed", ODD, ("float32", "int4")),
        _case("mixed", ODD, ("int4", "float32")),
        _case("mixed", ODD, ("int8", "fp8")),
    ),
)
