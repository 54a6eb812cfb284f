"""Cases of attention for GPUs: small ones that walk every launch path in the interpreter, and steps of an 8B model.

The truth is that of cases.py and format_cases.py. Large inputs are made on torch's default device, so that a benchmark
makes them where they are read; of their results a few rows are compared.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results
from ..chip import Chip
from ..kv_format import FORMATS, KVFormat, LayerPages, Pages
from . import AttentionItems, Ints, Masking, cases, format_cases
from .case_steps import Step, decode, decode_shared, prefill, prefill_shared
from .cases import Shape
from .gpu_choice import Tiles

NARROW, WIDE, MERGE = "narrow", "wide", "merge"
COMPARED = 8  # rows of a large case


def path(query: Tensor, pages: LayerPages, items: AttentionItems, masking: Masking) -> list[tuple[Any, ...]]:
    """What is launched, with how many tasks, or merged queries, before rounding."""
    from .gpu import plan_attention

    plan = plan_attention(items, pages.block_size, Tiles(Chip(), {}))
    sizes = plan.layout(query.shape[1], pages, query.dtype).tasks.sizes
    counts = ((NARROW, sizes.narrow), (WIDE, sizes.wide), (MERGE, sizes.merges))
    return [(name, count) for name, count in counts if count]


def case(
    name: str, step: Step, formats: tuple[str, str], shape: Shape, path: list[tuple[Any, ...]] | None = None
) -> Case:
    made = format_cases.case(name, step, *formats, shape)
    return Case(made.name, made.make, made.elements, made.bytes, made.operations, path)


FLOAT = ("float32", "float32")
SUNK = Shape(2, 1, 64, window=60, sinks=3.0)
SMALL = Op(
    name="attention",
    run=format_cases.run,
    expected=format_cases.expected,
    tolerance=format_cases.OP.tolerance,
    path=path,
    cases=(
        case("decode, two rows", decode(2, 70), FLOAT, Shape(4, 1, 128), path=[(NARROW, 2)]),
        case("decode behind a prefix", decode_shared(96, 3), FLOAT, Shape(3, 1, 64), path=[(NARROW, 4), (MERGE, 3)]),
        case("eight query heads", decode(2, 40, 32), FLOAT, Shape(8, 1, 80), path=[(NARROW, 2)]),
        case("seven query heads, verified drafts", prefill(50, 4), FLOAT, Shape(7, 1, 96), path=[(NARROW, 2)]),
        case("twenty query heads", prefill(50, 4, 8), FLOAT, Shape(20, 1, 16), path=[(WIDE, 1)]),
        case("a prompt", prefill(0, 70), FLOAT, Shape(3, 1, 128), path=[(WIDE, 2)]),
        case("a prompt, window", prefill(150, 40), FLOAT, Shape(2, 1, 64, window=60), path=[(WIDE, 1)]),
        case("split keys", decode(1, 1100), FLOAT, Shape(4, 1, 64), path=[(NARROW, 4), (MERGE, 1)]),
        case("split keys of a prompt", prefill(500, 33), FLOAT, Shape(1, 1, 48), path=[(WIDE, 2), (MERGE, 33)]),
        case("sinks, decode behind a prefix", decode_shared(96, 3), FLOAT, Shape(3, 1, 64, sinks=5.0)),
        case("sinks, split keys", decode(1, 1100), FLOAT, Shape(4, 1, 64, sinks=7.0), path=[(NARROW, 4), (MERGE, 1)]),
        case("sinks, a prompt", prefill(150, 40), FLOAT, SUNK, path=[(WIDE, 1)]),
        *(
            case("sinks", decode(2, 70), (name, name), Shape(4, 1, 64, softcap=3.0, sinks=2.0), path=[(NARROW, 2)])
            for name in ("bfloat16", *format_cases.QUANTISED)
        ),
        case("window leaves items unseen", prefill_shared(64, 2, 40, 8), FLOAT, Shape(1, 1, 64, window=20)),
        *(
            case(f"heads of {width}", prefill(70, 20), (name, name), Shape(2, 1, width), path=[(WIDE, 1)])
            for name in format_cases.QUANTISED
            for width in (64, 80, 128, 256)
        ),
        *(
            case("narrow heads of 80", decode(2, 40), (name, name), Shape(3, 1, 80), path=[(NARROW, 2)])
            for name in ("fp8", "int8")
        ),
        case("pair", prefill(70, 20), ("int4", "fp8"), Shape(2, 1, 48, window=30), path=[(WIDE, 1)]),
        case("pair", decode(2, 70), ("bfloat16", "int4"), Shape(2, 1, 128, softcap=3.0), path=[(NARROW, 2)]),
    ),
)


def make_large(step: Step, shape: Shape, format: KVFormat, dtype: torch.dtype) -> Arguments:
    """(query, pages, items, masking): random codes in every slot, scales that give numbers of about 1."""
    items, num_blocks = step.build()
    source = torch.Generator(torch.get_default_device()).manual_seed(step.seed)
    query = torch.randn(len(items.positions), shape.num_heads, shape.head_dim, generator=source).to(dtype)
    sizes = (shape.num_kv_heads, num_blocks, step.block_size)
    pages = LayerPages(*(_random_pages(format, sizes, shape.head_dim, source) for _ in range(2)))
    return query, pages, items, shape.masking()


def _random_pages(format: KVFormat, sizes: tuple[int, int, int], head_dim: int, source: torch.Generator) -> Pages:
    shape = (*sizes, format.width(head_dim))
    if format.name in ("int8", "int4"):
        codes = torch.empty(shape, dtype=torch.uint8).random_(generator=source)
        codes = codes.view(torch.int8).clamp_(min=-127) if format.name == "int8" else codes
    else:
        made_as = torch.bfloat16 if format.scaled else format.dtype
        codes = torch.empty(shape, dtype=made_as).normal_(generator=source).to(format.dtype)
    groups = format.num_scales(head_dim) // 2
    of_vector = {"fp8": [1.0], "int8": [1 / 64], "int4": [0.2] * groups + [-1.5] * groups}.get(format.name, [])
    scales = torch.tensor(of_vector).expand(*sizes, len(of_vector)).contiguous()
    return Pages(format, codes, scales, head_dim)


def run_large(kernels: Kernels, query: Tensor, pages: LayerPages, items: AttentionItems, masking: Masking) -> Results:
    (out,) = format_cases.run(kernels, query, pages, items, masking)
    return (out[_compared(items)],)


def expected_large(query: Tensor, pages: LayerPages, items: AttentionItems, masking: Masking) -> Results:
    """Of the rows compared alone."""
    rows = _compared(items)
    kept = np.isin(items.queries, rows)
    few = replace(
        items,
        queries=np.searchsorted(rows, items.queries[kept]),
        query_offset=np.concatenate([[0], np.cumsum(kept)])[items.query_offset],
        positions=items.positions[rows],
    )
    return format_cases.expected(query[rows], pages, few, masking)


def _compared(items: AttentionItems) -> Ints:
    return np.unique(np.linspace(0, len(items.positions) - 1, COMPARED).astype(np.int64))


def prepare_large(
    kernels: Kernels, query: Tensor, pages: LayerPages, items: AttentionItems, masking: Masking
) -> Callable[[], Tensor]:
    """One layer of a step whose plan is made. The pages of most cases are larger than any cache."""
    plan = kernels.plan_attention(items, pages.block_size)
    return lambda: kernels.attention(query, pages, plan, masking)


def shared(prefix: int, rows: int, own: int, block_size: int = 16) -> Step:
    """Rows that decode behind one prefix with equally many keys of their own."""
    step = Step(block_size)
    queries = [row for _ in range(rows) for row in step.sequence(prefix, own - 1, 1)]
    step.item(0, prefix, queries)
    return step


def large(name: str, step: Step, format: str) -> Case:
    counted = format_cases.case(name, step, format, format, cases.WIDE)
    return replace(counted, make=lambda dtype: make_large(step, cases.WIDE, FORMATS[format], dtype))


def large_cases(scale: int = 1) -> tuple[Case, ...]:
    """Steps in the shape of Llama-3.1-8B; `scale` divides rows and keys, for a trial without a device."""
    steps = {
        **{f"decode {rows} x 1024": decode(rows // scale, 1024 // scale) for rows in (64, 256, 512, 1024)},
        "prompt of 2048": prefill(0, 2048 // scale),
        "4 prompts of 2048": prompts(4, 2048 // scale),
        "512 x 100 behind 2000 shared": shared(2000 // scale // 16 * 16, 512 // scale, 100 // scale),
        "512 x 2100, nothing shared": decode(512 // scale, 2100 // scale),
    }
    narrow = ("decode 64 x 1024", "decode 512 x 1024", "512 x 100 behind 2000 shared", "prompt of 2048")
    return (
        *(large(name, step, "bfloat16") for name, step in steps.items()),
        *(large(name, steps[name], format) for format in format_cases.QUANTISED for name in narrow),
    )


def prompts(rows: int, fed: int, block_size: int = 16) -> Step:
    step = Step(block_size)
    for _ in range(rows):
        step.sequence(0, 0, fed)
    return step


def large_op(scale: int = 1) -> Op:
    """The op for benchmarks; made when asked for, since steps of many rows take a moment to lay out."""
    return Op(
        name="attention",
        run=run_large,
        expected=expected_large,
        tolerance={torch.bfloat16: 2e-2},
        path=path,
        prepare=prepare_large,
        cases=large_cases(scale),
    )
