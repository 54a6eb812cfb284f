"""Attention by the native library: lays a step out once and passes addresses. Knows tensors and the C interface."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kv_format import MAX_NATIVE_HEAD_DIM, NATIVE, LayerPages, Pages
from ..native.library import NUMBERS
from ..native.tape import empty, run
from . import AttentionItems, Ints, Masking, reference
from .tasks import MAX_LANES, Heads, Tasks, expand, make_tasks, split


class _Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tasks", "queries", "positions", "blocks", "direct")),
        *((name, ctypes.c_void_p) for name in ("merged_queries", "merge_offsets", "merge_partials")),
        *((name, ctypes.c_int64) for name in ("num_tasks", "num_merged", "num_partials", "block_size")),
    )


class _Stored(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("format", "row_bytes", "num_scales")),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("plan", "query", "out")),
        *((name, _Stored) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "head_step", "block_step")),
        *((name, ctypes.c_int64) for name in ("query_bfloat16", "turned", "window")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
    )


@dataclass(slots=True)
class Layout:
    """A C plan, which keeps its place, and the arrays it points to."""

    plan: _Plan
    arrays: tuple[Ints, ...]

    def holds(self, layout: "Layout") -> bool:
        """Any other fits in its place."""
        return True

    def refill(self, layout: "Layout") -> None:
        """Puts the tasks of another step in the place of these."""
        ctypes.memmove(ctypes.byref(self.plan), ctypes.byref(layout.plan), ctypes.sizeof(_Plan))
        self.arrays = layout.arrays


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The items of a step and what the library reads of them, made when the first layer of a geometry runs."""

    items: AttentionItems
    block_size: int
    reference: reference.AttentionPlan  # for dtypes the library lacks
    layouts: dict[Heads, Layout] = field(default_factory=dict)

    def laid_out(self, heads: Heads) -> Layout:
        """The layout for layers with such heads. Raises ValueError when a query sees no key."""
        if heads not in self.layouts:
            tasks = make_tasks(self.items, self.block_size, heads, torch.get_num_threads())
            self.layouts[heads] = _make_layout(self.items, tasks, self.block_size, heads.num_kv_heads)
        return self.layouts[heads]


def plan_attention(items: AttentionItems, block_size: int) -> NativePlan:
    """See the contract."""
    return NativePlan(items, block_size, reference.plan_attention(items, block_size))


def attention(library: Any, query: Tensor, pages: LayerPages, plan: NativePlan, masking: Masking) -> Tensor:
    """[T, Q, D] attended over the pages of a layer; see the contract. Raises ValueError for heads above 512
    wide, and for more than 256 query heads to a key head.
    """
    if query.dtype not in NUMBERS or not {pages.keys.format.name, pages.values.format.name} <= NATIVE:
        return reference.attention(query, pages, plan.reference, masking)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = pages.num_kv_heads
    if head_dim > MAX_NATIVE_HEAD_DIM:
        raise ValueError(f"attention: heads of {head_dim} numbers, native kernels take {MAX_NATIVE_HEAD_DIM} at most")
    if num_heads > MAX_LANES * num_kv_heads:
        heads = f"{num_heads} query heads to {num_kv_heads} key heads"
        raise ValueError(f"attention: {heads}, native kernels take {MAX_LANES} to one at most")
    if query.stride(2) != 1:
        query = query.contiguous()
    out = empty(query.shape, query.dtype)
    if num_tokens == 0:
        return out
    layout = plan.laid_out(Heads(num_heads // num_kv_heads, num_kv_heads, head_dim))
    call = _Call(
        *(num_tokens, ctypes.addressof(layout.plan)),
        *(query.data_ptr(), out.data_ptr(), _stored(pages.keys), _stored(pages.values)),
        *(query.stride(0), query.stride(1)),
        *(num_heads, num_kv_heads, head_dim, pages.head_step, pages.block_step),
        *(query.dtype == torch.bfloat16, pages.keys.format.turned, masking.window or 0),
        *(masking.scale, masking.softcap or 0.0),
        None if masking.sinks is None else masking.sinks.data_ptr(),
    )
    run(library.batchgen_attention, call)
    return out


def _stored(pages: Pages) -> _Stored:
    codes, scales, format = pages.codes, pages.scales, pages.format
    return _Stored(codes.data_ptr(), scales.data_ptr(), format.number, pages.row_bytes, scales.shape[3])


def _make_layout(items: AttentionItems, tasks: Tasks, block_size: int, num_kv_heads: int) -> Layout:
    task, first_head, num_heads = split(np.full(len(tasks.item), num_kv_heads), tasks.num_heads)
    columns = (
        tasks.first_query,
        tasks.num_queries,
        items.block_offset[tasks.item] + tasks.first_key // block_size,
        tasks.num_keys,
        items.start[tasks.item] + tasks.first_key,
        tasks.first_partial,
    )
    rows = np.stack([*(column[task] for column in columns), first_head, num_heads], axis=1)
    merged, offsets, partials = _merges(items, tasks)
    parts = (rows, items.queries, items.positions, items.blocks, tasks.counts == 1, merged, offsets, partials)
    arrays = tuple(np.ascontiguousarray(part, dtype=np.int64) for part in parts)
    addresses = (array.ctypes.data for array in arrays)
    return Layout(_Plan(*addresses, len(rows), len(merged), tasks.num_partials, block_size), arrays)


def _merges(items: AttentionItems, tasks: Tasks) -> tuple[Ints, Ints, Ints]:
    """Queries with several partial results: their numbers, offsets, and the rows of the results."""
    query = items.queries[expand(tasks.first_query, tasks.num_queries)]
    rows = np.flatnonzero(tasks.counts[query] > 1)
    rows = rows[np.argsort(query[rows], kind="stable")]
    merged = np.flatnonzero(tasks.counts > 1)
    return merged, np.concatenate([[0], np.cumsum(tasks.counts[merged])]), rows
