"""What recorded steps need, without a GPU: attention plans that can be refilled in place, and a recorder that calls.

A recording replays on the buffers it was made with, so whatever is not refilled, or not padded, shows in the answers.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from batchgen.engine.recorders import Replay, Size, padded_size
from batchgen.kernels.attention import AttentionItems
from batchgen.kernels.attention.reference import attention, plan_attention
from batchgen.kernels.tables import ReferenceKernels

Geometry = namedtuple("Geometry", ["num_heads", "num_kv_heads"])


class Sizes(namedtuple("Sizes", ["items", "blocks"])):
    def holds(self, other: "Sizes") -> bool:
        return all(own >= asked for own, asked in zip(self, other, strict=True))


class Layout:
    """The items of a step; a later step's, if they are no more, can take their place."""

    def __init__(self, items: AttentionItems) -> None:
        self.items = items
        self.sizes = Sizes(len(items.length), -(-len(items.blocks) // 16) * 16)
        self.tasks = SimpleNamespace(sizes=Sizes(len(items.length), len(items.blocks)))

    def holds(self, layout: "Layout") -> bool:
        return self.sizes.holds(layout.tasks.sizes)

    def widen(self, layout: "Layout") -> None:
        self.sizes = Sizes(*map(max, self.sizes, layout.sizes))

    def refill(self, layout: "Layout") -> None:
        assert self.holds(layout)
        self.items = layout.items


@dataclass
class Plan:
    items: AttentionItems
    block_size: int
    layouts: dict[Geometry, Layout] = field(default_factory=dict)

    def laid_out(self, geometry: Geometry) -> Layout:
        return self.layouts.setdefault(geometry, Layout(self.items))


class RefillableKernels(ReferenceKernels):
    """Rows of query behind the last one of the items come out as NaN."""

    def plan_attention(self, items, block_size):
        return Plan(items, block_size)

    def attention(self, query, pages, plan, masking):
        items = plan.laid_out(Geometry(query.shape[1], pages.num_kv_heads)).items
        out = torch.full_like(query, torch.nan)
        count = len(items.positions)
        inner = plan_attention(items, plan.block_size)
        out[:count] = attention(query[:count], pages, inner, masking)
        return out


@dataclass
class CallingRecorder:
    """Records nothing: a replay is the call again, over the same buffers."""

    recorded: int = 0
    replayed: int = 0
    scrap_blocks: int = 1

    def size(self, step: Size) -> Size | None:
        padded = padded_size(step.tokens)
        return Size(padded, padded) if step.sampled == step.tokens else None

    def record(self, call: Callable[[], Tensor], size: Size) -> Replay:
        call()
        self.recorded += 1

        def replay(step: Size) -> Tensor:
            self.replayed += 1
            return call()

        return replay
