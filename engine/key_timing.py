"""How long queries take to read keys on this machine: keys of their own, keys read together, and when the latter pays.

Knows the attention op and its items; how a call is timed is the caller's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch

from ..kernels import Kernels
from ..kernels.attention import AttentionItems, Masking
from .kv import KVPages, KVShape
from .sharing import BUILT_IN, Sharing, fitted
from .spec import ModelSpec

ROWS, CONTEXT = 64, 512
LAYERS = 4  # read in turn, so that no layer's keys are still in the caches when it comes again
BLOCK_SIZE = 16
SHARES = (4, 512), (32, 128), (32, 512)  # queries, and keys that they read together
OWN_KEYS = 32  # of each query, behind those


def items_of(blocks: np.ndarray, keys: int, query_offset: np.ndarray, positions: np.ndarray) -> AttentionItems:
    """One item for each row of `blocks`, with `keys` keys."""
    count, width = blocks.shape
    return AttentionItems(
        start=np.zeros(count, np.int64),
        length=np.full(count, keys),
        block_offset=np.arange(count + 1) * width,
        blocks=blocks.ravel(),
        query_offset=query_offset,
        queries=np.arange(len(positions)),
        positions=positions,
    )


def _joined(first: AttentionItems, second: AttentionItems) -> AttentionItems:
    """The items of both, for the same rows."""
    return AttentionItems(
        start=np.concatenate([first.start, second.start]),
        length=np.concatenate([first.length, second.length]),
        block_offset=np.concatenate([first.block_offset, first.block_offset[-1] + second.block_offset[1:]]),
        blocks=np.concatenate([first.blocks, second.blocks]),
        query_offset=np.concatenate([first.query_offset, first.query_offset[-1] + second.query_offset[1:]]),
        queries=np.concatenate([first.queries, second.queries]),
        positions=first.positions,
    )


@dataclass(frozen=True, slots=True)
class KeyTiming:
    """Times of one model's queries on a device. `seconds` times a call."""

    spec: ModelSpec
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    seconds: Callable[[Callable[[], object]], float]

    def pair(self, shape: KVShape, together: bool) -> float:
        """Seconds of a query with a key in all layers: keys of every query's own, or read `together`."""
        context = min(CONTEXT, self.spec.context_length)
        width, count = -(-context // BLOCK_SIZE), 1 if together else ROWS
        ends = np.array([0, ROWS]) if together else np.arange(ROWS + 1)
        blocks = np.arange(count * width).reshape(count, width)
        seconds = self._layer(shape, items_of(blocks, context, ends, np.full(ROWS, context - 1)))
        return seconds * self.spec.num_layers / (ROWS * context)

    def sharing(self, shape: KVShape) -> Sharing:
        """What keys cost that queries read together, beside keys that each reads by itself."""
        return fitted({(count, keys): self._share(shape, count, keys) for count, keys in SHARES})

    def _share(self, shape: KVShape, count: int, keys: int) -> float:
        """Cost of `keys` that so many queries read together, beside that of each reading them by itself."""
        width, own = keys // BLOCK_SIZE, OWN_KEYS // BLOCK_SIZE
        tails = width + np.arange(count * own).reshape(count, own)
        positions, each = np.full(count, keys + OWN_KEYS - 1), np.arange(count + 1)
        shared = items_of(np.arange(width)[None], keys, np.array([0, count]), positions)
        behind = replace(items_of(tails, OWN_KEYS, each, positions), start=np.full(count, keys))
        whole = np.concatenate([np.tile(np.arange(width), (count, 1)), tails], axis=1)
        apart = self._layer(shape, items_of(whole, keys + OWN_KEYS, each, positions))
        together = self._layer(shape, _joined(shared, behind))
        return 1 + (together - apart) / apart * (keys + OWN_KEYS) / keys

    @torch.inference_mode()
    def _layer(self, shape: KVShape, items: AttentionItems) -> float:
        """Seconds of one layer."""
        spec, kernels, device = self.spec, self.kernels, self.device
        query = torch.randn(len(items.positions), spec.num_heads, spec.head_dim, dtype=self.dtype, device=device)
        plan, masking = kernels.plan_attention(items, BLOCK_SIZE), Masking(spec.attention_scale, None)
        pages = KVPages(shape, int(items.blocks.max()) + 1, BLOCK_SIZE, device)
        pages.clear()  # memory of a host that was never written to is one page of zeros, which caches hold
        layers = cycle([pages.layer(index) for index in range(shape.num_layers)])
        return self.seconds(lambda: kernels.attention(query, next(layers), plan, masking))


# By kind of device. On a card these few keys take less than the launch that reads them.
SHARING: dict[str, Callable[[KeyTiming, KVShape], Sharing]] = {
    "cpu": lambda timing, shape: timing.sharing(shape),
    "cuda": lambda timing, shape: BUILT_IN["cuda"],
}
