"""Cases of attention over pages in other formats than the queries': steps, head widths, pairs of formats.

The truth is attention in float64 over the numbers that the pages hold, with queries turned where keys are.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results
from ..kv_format import FORMATS, KVFormat, LayerPages, Pages
from ..kv_format.cases import empty_pages
from ..kv_format.reference import decode, turn
from ..rotate_write.reference import write_kv
from . import AttentionItems, Masking, cases
from .case_steps import Step, branching, decode_shared, key_slots, prefill, prefill_shared
from .case_steps import decode as decode_step
from .cases import Shape

QUANTISED = ("fp8", "int8", "int4")


def make(step: Step, shape: Shape, formats: tuple[KVFormat, KVFormat], dtype: torch.dtype) -> Arguments:
    """(query, pages, items, masking): what cases.make gives, written to pages of these formats."""
    query, keys, values, items, masking = cases.make(step, shape, dtype)
    num_heads, num_blocks, block_size, head_dim = keys.shape
    sizes = (num_heads, num_blocks, block_size, head_dim)
    pages = LayerPages(*(empty_pages(format, *sizes) for format in formats))
    owned = [key_slots(items, item, block_size) for item in range(len(items.start))]
    slots = torch.from_numpy(np.unique(np.concatenate(owned)))
    flat = (side.view(num_heads, -1, head_dim)[:, slots].transpose(0, 1) for side in (keys, values))
    write_kv(*flat, slots, pages)
    return query, pages, items, masking


def run(kernels: Kernels, query: Tensor, pages: LayerPages, items: AttentionItems, masking: Masking) -> Results:
    plan = kernels.plan_attention(items, pages.block_size)
    return (kernels.attention(query, pages, plan, masking),)


def expected(query: Tensor, pages: LayerPages, items: AttentionItems, masking: Masking) -> Results:
    if pages.keys.format.turned:
        query = turn(query.float())
    return cases.expected(query, numbers(pages.keys), numbers(pages.values), items, masking)


def numbers(pages: Pages) -> Tensor:
    """[K, N, B, D]: what the pages hold."""
    return decode(pages.format, pages.codes, pages.scales, pages.head_dim)


def prepare(
    kernels: Kernels, query: Tensor, pages: LayerPages, items: AttentionItems, masking: Masking
) -> Callable[[], Tensor]:
    """As cases.prepare."""
    plan = kernels.plan_attention(items, pages.block_size)
    number = cases.layers_beyond_caches(
        sum(stored.nbytes for side in (pages.keys, pages.values) for stored in (side.codes, side.scales))
    )
    layers = cycle([LayerPages(_as_stored(pages.keys), _as_stored(pages.values)) for _ in range(number)])
    return lambda: kernels.attention(query, next(layers), plan, masking)


def _as_stored(pages: Pages) -> Pages:
    scales = cases.as_stored(pages.scales) if pages.format.scaled else pages.scales
    return replace(pages, codes=cases.as_stored(pages.codes), scales=scales)


USUAL = Shape()


def case(name: str, step: Step, keys: str, values: str, shape: Shape = USUAL) -> Case:
    formats = FORMATS[keys], FORMATS[values]
    _, operations = cases.work(step, shape)
    title = f"{name}, {keys}" if keys == values else f"{name}, {keys} keys and {values} values"
    asked = 2 * len(step.positions) * shape.num_heads * shape.head_dim
    vectors = sum(step.length) * shape.num_kv_heads
    return Case(
        title,
        lambda dtype: make(step, shape, formats, dtype),
        elements=asked,
        bytes=vectors * sum(format.vector_bytes(shape.head_dim) for format in formats),
        operations=operations,
    )


def _few_queries() -> Step:
    """Rows that feed one to four tokens behind keys of their own."""
    step = Step(16)
    for fed in (1, 2, 3, 4):
        step.sequence(0, 40 - fed, fed)
    return step


GROUPED = Shape(7, 1, 40)
SUNK = Shape(8, 2, 80, window=60, softcap=3.0, sinks=3.0)
SMALL = tuple(
    made
    for name in QUANTISED
    for made in (
        case("three levels, blocks of 8", branching(8), name, name, Shape(6, 2, 33)),
        case("window", branching(16), name, name, Shape(8, 2, 80, window=11)),
        case("softcap and window", branching(32), name, name, Shape(4, 2, 48, window=9, softcap=3.0)),
        case("one key head for seven", prefill(3, 30, 8), name, name, GROUPED),
        case("decode behind a prefix", decode_shared(100, 9), name, name),
        case("long prompt", prefill(130, 90), name, name, Shape(4, 2, 128)),
        case("decode of wide heads, blocks of 8", decode_step(20, 53, 8), name, name, Shape(8, 2, 128)),
        case("sinks, decode behind a prefix", decode_shared(100, 9), name, name, Shape(8, 2, 64, sinks=5.0)),
        case("sinks, a prompt, softcap and window", prefill(70, 40), name, name, SUNK),
        case("a few queries a row, window", _few_queries(), name, name, Shape(3, 3, 64, window=21)),
    )
)
FEW_LANES = tuple(  # some to three times as many as pass a key together, some with a rest
    case(f"a few queries a row, {heads} heads", _few_queries(), name, name, Shape(heads, 2, width))
    for name in ("float32", "bfloat16", *QUANTISED)
    for heads, width in ((6, 64), (14, 128), (10, 32))
)
PAIRS = tuple(
    case("pair", branching(16), keys, values, Shape(4, 2, 24))
    for keys in ("float32", "bfloat16", *QUANTISED)
    for values in ("float32", "bfloat16", *QUANTISED)
    if keys != values
)
EVERY = (*SMALL, *FEW_LANES, *PAIRS)
OVER_INT8 = tuple(one for one in EVERY if ", int8" in one.name)  # keys
OP = Op(
    name="attention",
    run=run,
    expected=expected,
    # the numbers read, turned queries and probabilities are rounded to bfloat16
    tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2},
    cases=tuple(one for one in EVERY if one not in OVER_INT8),
)
INT8_OP = replace(
    OP,
    # queries may be rounded to 8 bits: scores of D numbers move by some sqrt(D / 12) / 127 of the largest query number
    # times a key's, which here is a hundredth or two, and probabilities by as large a part
    tolerance={torch.float32: 1e-5, torch.bfloat16: 4e-2},
    cases=OVER_INT8,
)
STEPS = Op(
    name="attention",
    run=run,
    expected=expected,
    tolerance=INT8_OP.tolerance,
    prepare=prepare,
    cases=tuple(
        case(title, step, name, name)
        for title, step in (
            ("decode 64 x 150", decode_step(64, 150)),
            ("decode 64 x 300", decode_step(64, 300)),
            ("decode 64 x 1000", decode_step(64, 1000)),
            ("decode 256 x 300", decode_step(256, 300)),
            ("decode 64 x 2000", decode_step(64, 2000)),
            ("256 queries behind 896 shared", prefill_shared(896, 256, 1)),
            ("prefill 20 x 160 behind 608 shared", prefill_shared(608, 20, 160)),
        )
        for name in ("bfloat16", *QUANTISED)
    ),
)
