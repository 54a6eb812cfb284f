"""Paged attention in plain PyTorch: gather a batch of tiles, multiply, softmax, merge the partial results.

Knows tensors and the order of arithmetic; which tiles there are is decided in layout.py.

Shapes: G tiles of a batch, n queries and m keys of a tile, g = Q / K query heads of a key/value head.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..kv_format import LayerPages, Pages
from ..kv_format.reference import decode, turn
from . import AttentionItems, Ints, Masking
from .layout import Geometry, TileBatch, make_batches

HIDDEN = -1e30  # score of a key that is not seen: finite, so that a row without any key stays finite


@dataclass(frozen=True, slots=True)
class Batch:
    """A TileBatch on the device, with one index per key/value head: heads are rows of the flattened tensors."""

    shape: tuple[int, int, int]  # G, n, m
    queries: Tensor  # [K * G * n] rows of the head-major queries [K * T, g * D]
    heads: Tensor  # [K * G * m / B] the heads of the blocks to read
    blocks: Tensor  # [K * G * m / B] the blocks
    stale: Tensor  # rows of the gathered keys [K * G * m, D] that hold no key
    bias: Tensor | None  # [G, n, 1, m] float32, 0 or HIDDEN
    first_row: int  # of this batch's partial results, [K * G * n] rows


@dataclass(frozen=True, slots=True)
class Merge:
    """Queries with the same number of partial results."""

    queries: Tensor  # [t] rows of the step
    partials: tuple[Tensor, ...]  # one entry per partial: [t * K] rows of the partial results


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a step that layers of one geometry share."""

    batches: tuple[Batch, ...]
    merges: tuple[Merge, ...]
    num_rows: int  # partial results


@dataclass(frozen=True, slots=True)
class Partials:
    """Normalised partial results of a layer and the log-sum-exp each was normalised by."""

    outputs: Tensor  # [rows, g, D] dtype of query
    weights: Tensor  # [rows, g] float32


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The items of a step and the layouts made of them, one per geometry, when a layer first asks."""

    items: AttentionItems
    block_size: int
    layouts: dict[Geometry, Layout] = field(default_factory=dict)

    def layout(self, geometry: Geometry) -> Layout:
        if geometry not in self.layouts:
            self.layouts[geometry] = _make_layout(self.items, geometry)
        return self.layouts[geometry]


def plan_attention(items: AttentionItems, block_size: int) -> AttentionPlan:
    """See the contract. Indices are built when the first layer of a geometry runs and serve all its layers."""
    return AttentionPlan(items, block_size)


def attention(query: Tensor, pages: LayerPages, plan: AttentionPlan, masking: Masking) -> Tensor:
    """[T, Q, D] attended over the pages of a layer; see the contract."""
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return torch.empty_like(query)
    num_kv_heads = pages.num_kv_heads
    if pages.keys.format.turned:
        query = turn(query.float()).to(query.dtype)
    geometry = Geometry(num_heads, num_kv_heads, head_dim, plan.block_size, masking.window)
    layout = plan.layout(geometry)
    group = num_heads // num_kv_heads
    folds = query.dtype == torch.float32 or math.frexp(masking.scale)[0] == 0.5
    rows = query.reshape(num_tokens, num_kv_heads, group * head_dim).transpose(0, 1)
    rows = (rows * masking.scale if folds else rows).reshape(num_kv_heads * num_tokens, group * head_dim)
    rest = replace(masking, scale=1.0 if folds else masking.scale)
    partials = Partials(
        torch.empty(layout.num_rows, group, head_dim, dtype=query.dtype, device=query.device),
        torch.empty(layout.num_rows, group, device=query.device),
    )
    for batch in layout.batches:
        _attend(rows, pages, batch, rest, partials)
    sinks = None if masking.sinks is None else masking.sinks.view(num_kv_heads, group)
    return _merge(partials, layout.merges, query, sinks)


def _attend(rows: Tensor, pages: LayerPages, batch: Batch, masking: Masking, partials: Partials) -> None:
    """Writes the partial results of one batch."""
    num_heads, head_dim = pages.num_kv_heads, pages.keys.head_dim
    num_tiles, num_queries, num_keys = batch.shape
    mine = slice(batch.first_row, batch.first_row + num_heads * num_tiles * num_queries)
    query = rows.index_select(0, batch.queries).view(num_heads * num_tiles, -1, head_dim)
    scores = _scores(query, _gather(pages.keys, batch, query.dtype).transpose(1, 2))
    if masking.scale != 1.0:
        scores *= masking.scale
    if masking.softcap is not None:
        scores.div_(masking.softcap).tanh_().mul_(masking.softcap)
    if batch.bias is not None:
        scores.view(num_heads, num_tiles, num_queries, -1, num_keys).add_(batch.bias)
    largest = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)  # its largest entry is 1 / sum of exp(score - largest)
    partials.weights[mine] = (largest - scores.amax(-1).log_()).view(-1, partials.weights.shape[1])
    out = partials.outputs[mine].view(num_heads * num_tiles, -1, head_dim)
    torch.bmm(scores.to(query.dtype), _gather(pages.values, batch, query.dtype), out=out)


def _gather(pages: Pages, batch: Batch, dtype: torch.dtype) -> Tensor:
    """The vectors of a batch as [K * G, m, D], zero where a slot holds no key of its item."""
    codes, scales = (_blocks(stored, batch) for stored in (pages.codes, pages.scales))
    rows = decode(pages.format, codes, scales, pages.head_dim).to(dtype).index_fill_(0, batch.stale, 0)
    return rows.view(-1, batch.shape[2], pages.head_dim)


def _blocks(stored: Tensor, batch: Batch) -> Tensor:
    """The batch's blocks of codes or scales [K, N, B, x] as rows [blocks * B, x]."""
    moved = stored.view(torch.int8) if stored.dtype.itemsize == 1 else stored
    return moved[batch.heads, batch.blocks].flatten(0, 1).view(stored.dtype)


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    """query [b, r, D] times keys [b, D, m] in float32.

    Low precision products come rounded; a second product gives what the rounding took, and the sum of both has twice
    the digits.
    """
    if query.dtype == torch.float32:
        return torch.bmm(query, keys)
    rounded = torch.bmm(query, keys)
    rest = torch.baddbmm(rounded, query, keys, beta=-1)
    return rounded.float().add_(rest)


def _merge(partials: Partials, merges: tuple[Merge, ...], query: Tensor, sinks: Tensor | None) -> Tensor:
    parts = [_merge_one(partials, merge, query, sinks) for merge in merges]
    if len(parts) == 1:
        return parts[0]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for part, merge in zip(parts, merges, strict=True):
        out.index_copy_(0, merge.queries, part)
    return out


def _merge_one(partials: Partials, merge: Merge, query: Tensor, sinks: Tensor | None) -> Tensor:
    """[t, Q, D]: partial results weighed by their share of the whole sum, of which sinks [K, g] have theirs."""
    shape = (len(merge.queries), *query.shape[1:])
    parts = [partials.outputs.index_select(0, rows) for rows in merge.partials]
    if len(parts) == 1 and sinks is None:
        return parts[0].view(shape)
    sums = [partials.weights.index_select(0, rows) for rows in merge.partials]
    if sinks is not None:
        sums.append(sinks.repeat(len(merge.queries), 1))
    shares = torch.softmax(torch.stack(sums), 0).unsqueeze(-1)
    merged = parts[0] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=False):
        merged.addcmul_(part.float(), share)
    return merged.to(query.dtype).view(shape)


def _make_layout(items: AttentionItems, geometry: Geometry) -> Layout:
    tile_batches = make_batches(items, geometry)
    batches: list[Batch] = []
    num_rows = 0
    for tiles in tile_batches:
        batches.append(_make_batch(tiles, geometry, len(items.positions), num_rows))
        num_rows += geometry.num_kv_heads * tiles.queries.size
    merges = _make_merges(tile_batches, batches, geometry.num_kv_heads, len(items.positions))
    return Layout(tuple(batches), merges, num_rows)


def _make_batch(tiles: TileBatch, geometry: Geometry, num_tokens: int, first_row: int) -> Batch:
    heads = np.arange(geometry.num_kv_heads)[:, None]
    shape = (*tiles.queries.shape, tiles.blocks.shape[1] * geometry.block_size)
    bias = None
    if tiles.hidden is not None:
        bias = torch.from_numpy(np.where(tiles.hidden, np.float32(HIDDEN), np.float32(0))).unsqueeze(2)
    return Batch(
        shape=shape,
        queries=torch.from_numpy((heads * num_tokens + tiles.queries.ravel()).ravel()),
        heads=torch.from_numpy(np.repeat(heads, tiles.blocks.size)),
        blocks=torch.from_numpy(np.tile(tiles.blocks.ravel(), geometry.num_kv_heads)),
        stale=torch.from_numpy((heads * (shape[0] * shape[2]) + tiles.stale).ravel()),
        bias=bias,
        first_row=first_row,
    )


def _make_merges(
    tile_batches: list[TileBatch], batches: list[Batch], num_kv_heads: int, num_tokens: int
) -> tuple[Merge, ...]:
    """Groups the queries by how many partial results they have and says where these lie."""
    query, row, stride = _partial_rows(tile_batches, batches)
    order = np.argsort(query, kind="stable")
    counts = np.bincount(query, minlength=num_tokens)
    first = np.cumsum(counts) - counts
    heads = np.arange(num_kv_heads)
    merges = []
    for count in np.unique(counts):
        chosen = np.flatnonzero(counts == count)
        partials = []
        for rank in range(count):
            entry = order[first[chosen] + rank]
            partials.append(torch.from_numpy((row[entry][:, None] + stride[entry][:, None] * heads).ravel()))
        merges.append(Merge(torch.from_numpy(chosen), tuple(partials)))
    return tuple(merges)


def _partial_rows(tile_batches: list[TileBatch], batches: list[Batch]) -> tuple[Ints, Ints, Ints]:
    """Of every partial result: its query, its row for key/value head 0, and how far apart its heads are."""
    queries, rows, strides = [], [], []
    for tiles, batch in zip(tile_batches, batches, strict=True):
        slot = np.flatnonzero(tiles.present)
        queries.append(tiles.queries.ravel()[slot])
        rows.append(batch.first_row + slot)
        strides.append(np.full(len(slot), tiles.queries.size))
    return np.concatenate(queries), np.concatenate(rows), np.concatenate(strides)
