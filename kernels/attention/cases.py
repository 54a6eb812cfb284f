"""Cases of paged attention: the steps of case_steps.py over pages of plain numbers. Knows how to fill the pages.

Pages hold NaN wherever no item's key lies, so a result that touched such a slot shows it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from .. import Kernels
from ..case import Arguments, Case, Op, Results, generator
from ..kv_format.cases import plain_pages
from . import AttentionItems, Ints, Masking
from .case_steps import (
    Step,
    branching,
    decode,
    decode_shared,
    forked,
    key_slots,
    mixed,
    odd,
    prefill,
    prefill_shared,
)
from .layout import Geometry, make_batches

BEYOND_CACHES = 2**27  # bytes that no last level of cache holds


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of the model and what a layer does to its scores."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: float | None = None  # in the middle; every head has another

    def masking(self) -> Masking:
        sinks = self.sinks
        of_heads = None if sinks is None else torch.linspace(sinks - 1.5, sinks + 1.5, self.num_heads)
        return Masking(self.head_dim**-0.5, self.window, self.softcap, of_heads)


def make(step: Step, shape: Shape, dtype: torch.dtype) -> Arguments:
    """(query, key pages, value pages, items, masking)."""
    items, num_blocks = step.build()
    source = generator(step.seed)
    pages = (shape.num_kv_heads, num_blocks * step.block_size, shape.head_dim)
    owned = np.concatenate([key_slots(items, item, step.block_size) for item in range(len(items.start))])
    keys, values = torch.full(pages, torch.nan, dtype=dtype), torch.full(pages, torch.nan, dtype=dtype)
    for tensor in (keys, values):
        tensor[:, owned] = torch.randn(pages, generator=source)[:, owned].to(dtype)
    query = torch.randn(len(items.positions), shape.num_heads, shape.head_dim, generator=source) * 2
    paged = (shape.num_kv_heads, num_blocks, step.block_size, shape.head_dim)
    return query.to(dtype), keys.view(paged), values.view(paged), items, shape.masking()


def run(
    kernels: Kernels, query: Tensor, keys: Tensor, values: Tensor, items: AttentionItems, masking: Masking
) -> Results:
    plan = kernels.plan_attention(items, keys.shape[2])
    return (kernels.attention(query, plain_pages(keys, values), plan, masking),)


def prepare(
    kernels: Kernels, query: Tensor, keys: Tensor, values: Tensor, items: AttentionItems, masking: Masking
) -> Callable[[], Tensor]:
    """One layer of a step whose plan is made, on pages that another layer's have driven out of the caches."""
    plan = kernels.plan_attention(items, keys.shape[2])
    number = layers_beyond_caches(keys.nbytes + values.nbytes)
    layers = cycle([plain_pages(as_stored(keys), as_stored(values)) for _ in range(number)])
    return lambda: kernels.attention(query, next(layers), plan, masking)


def layers_beyond_caches(layer_bytes: int) -> int:
    """How many layers of that size no cache holds together: what one read is gone when its turn comes again."""
    return -(-BEYOND_CACHES // layer_bytes)


def as_stored(pages: Tensor) -> Tensor:
    """A copy on the same device, as the engine's pages are: on the host in aligned memory that NumPy asked for,
    which the system gives in huge pages.
    """
    if pages.device.type != "cpu":
        return pages.clone()
    memory = torch.from_numpy(np.zeros(pages.nbytes + 64, dtype=np.uint8))
    start = -memory.data_ptr() % 64
    return memory[start : start + pages.nbytes].view(pages.dtype).view(pages.shape).copy_(pages)


def expected(query: Tensor, keys: Tensor, values: Tensor, items: AttentionItems, masking: Masking) -> Results:
    """One query at a time over the list of its visible keys, in float64."""
    num_heads, _, block_size, head_dim = keys.shape
    flat_keys, flat_values = (pages.reshape(num_heads, -1, head_dim).double() for pages in (keys, values))
    out = torch.zeros(query.shape, dtype=torch.float64)
    for row, slots in enumerate(visible_slots(items, block_size, masking.window)):
        grouped = query[row].double().view(num_heads, -1, head_dim)
        scores = grouped @ flat_keys[:, slots].transpose(1, 2) * masking.scale
        if masking.softcap is not None:
            scores = masking.softcap * torch.tanh(scores / masking.softcap)
        if masking.sinks is None:
            weights = scores.softmax(-1)
        else:
            sinks = masking.sinks.double().view(num_heads, -1, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        out[row] = (weights @ flat_values[:, slots]).view(-1, head_dim)
    return (out,)


def visible_slots(items: AttentionItems, block_size: int, window: int | None) -> list[Tensor]:
    """For every query the slots of the keys it sees."""
    seen: list[list[Ints]] = [[] for _ in items.positions]
    for item in range(len(items.start)):
        slots = key_slots(items, item, block_size)
        place = items.start[item] + np.arange(len(slots))
        for row in items.queries[items.query_offset[item] : items.query_offset[item + 1]]:
            position = items.positions[row]
            visible = place <= position
            if window is not None:
                visible &= place > position - window
            seen[row].append(slots[visible])
    return [torch.from_numpy(np.concatenate(slots)) for slots in seen]


def path(query: Tensor, keys: Tensor, values: Tensor, items: AttentionItems, masking: Masking) -> list[tuple[int, ...]]:
    """Tiles, queries and keys of every batch."""
    geometry = Geometry(query.shape[1], keys.shape[0], keys.shape[3], keys.shape[2], masking.window)
    batches = make_batches(items, geometry)
    return [(*batch.queries.shape, batch.blocks.shape[1] * geometry.block_size) for batch in batches]


def work(step: Step, shape: Shape) -> tuple[int, int]:
    """Elements an item's keys, values, queries and outputs make, and operations of the visible pairs."""
    items, _ = step.build()
    pairs = 0
    for item in range(len(items.start)):
        positions = items.positions[items.queries[items.query_offset[item] : items.query_offset[item + 1]]]
        high = np.clip(positions + 1 - items.start[item], 0, items.length[item])
        low = 0 if shape.window is None else np.clip(positions + 1 - shape.window - items.start[item], 0, high)
        pairs += int((high - low).sum())
    moved = 2 * int(items.length.sum()) * shape.num_kv_heads * shape.head_dim
    moved += 2 * len(items.positions) * shape.num_heads * shape.head_dim
    return moved, 4 * pairs * shape.num_heads * shape.head_dim


def case(name: str, step: Step, shape: Shape = Shape(), path: object = None) -> Case:
    elements, operations = work(step, shape)
    return Case(name, lambda dtype: make(step, shape, dtype), elements=elements, operations=operations, path=path)


WINDOW = Shape(window=37)
SOFTCAP = Shape(4, 2, 48, softcap=3.0)
WIDE = Shape(32, 8, 128)

OP = Op(
    name="attention",
    run=run,
    expected=expected,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3},
    path=path,
    cases=(
        case("one token alone", prefill(0, 1), path=[(1, 1, 16)]),
        case("one block of 8, multi-head", prefill(0, 7, 8), Shape(5, 5, 24)),
        case("one key head for seven", prefill(3, 30, 8), Shape(7, 1, 40)),
        case("odd items", odd(), Shape(6, 2, 33)),
        *(case(f"three levels, blocks of {size}", branching(size)) for size in (8, 16, 32)),
        case("three levels, window", branching(16), Shape(8, 2, 32, window=11)),
        case("three levels, softcap and window", branching(8), Shape(4, 2, 48, window=9, softcap=3.0)),
        case("branches", forked(16)),
        case("branches, window", forked(8), Shape(8, 2, 32, window=6)),
        case("softcap", prefill(17, 40), SOFTCAP),
        case("window of one key", prefill(5, 9, 8), Shape(window=1)),
        case("window that leaves items unseen", prefill_shared(64, 3, 80, 8), WINDOW),
        case("decode behind a prefix", decode_shared(100, 40), path=[(26, 1, 176), (14, 1, 304), (1, 40, 112)]),
        case("decode, equal lengths", decode(70, 33), path=[(70, 1, 48)]),
        case("sinks", prefill(130, 90), Shape(sinks=4.0)),
        case("sinks, decode behind a prefix", decode_shared(100, 40), Shape(8, 2, 40, sinks=5.0)),
        case(
            "sinks, three levels, softcap and window", branching(8), Shape(6, 2, 33, window=9, softcap=3.0, sinks=2.0)
        ),
        case("sinks, a window of one key", prefill(5, 9, 8), Shape(window=1, sinks=0.0)),
        case("sinks, split keys", decode(3, 1100), Shape(4, 1, 64, sinks=6.0)),
        case("long prompt in tiles", prefill(700, 300, 32), path=None),
        case("wide model", prefill(130, 90), WIDE),
        case("mixed", mixed()),
    ),
)
STEPS = Op(
    name="attention",
    run=run,
    expected=expected,
    tolerance=OP.tolerance,
    path=path,
    prepare=prepare,
    cases=(
        case("a: decode 250 behind 896 shared", decode_shared(896, 250)),
        case("b: prefill 20 x 160 behind 608 shared", prefill_shared(608, 20, 160)),
        case("c: prompt of 2900, second chunk", prefill(1876, 1024)),
        case("d: decode 256 x 600, nothing shared", decode(256, 600)),
        case("e: mixed", mixed()),
    ),
)
