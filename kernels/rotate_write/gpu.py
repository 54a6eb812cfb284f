"""Rotary encoding and the KV write by Triton, in one launch. Knows strides and launches.

A program takes the keys, the values or some query heads of one token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_format import LayerPages
from ..kv_format.gpu import NARROWEST, Stored, addresses, stored
from ..kv_format.gpu_write import store_vectors, turn
from ..launch import Launch, power_of_two

NUMBERS = 2048  # of the query heads that one program turns


@dataclass(frozen=True, slots=True)
class Variant:
    """What the kernel is compiled for."""

    heads: int
    kv_heads: int
    kv_padded: int
    some: int  # query heads of a program
    width: int
    padded: int
    half: int
    block_size: int
    key_side: Stored
    value_side: Stored


@triton.jit
def turn_and_store(
    query, key, value, cos, sin, slots, out, key_codes, key_scales, value_codes, value_scales,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    head_step, block_step, V: tl.constexpr,
):  # fmt: skip
    """Program (token, 0): its keys; (token, 1): its values; (token, 2 ..): query heads. No slot below 0 is written."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    place = slot // V.block_size * block_step + slot % V.block_size
    if part >= 2:
        turn_queries(query + token * query_stride, query_head_stride, cos, sin, token, (part - 2) * V.some, out, V)
    elif part == 1:
        source = value + token * value_stride
        store_values(source, value_head_stride, slot, place, value_codes, value_scales, head_step, V)
    else:
        source = key + token * key_stride
        store_keys(source, key_head_stride, cos, sin, token, slot, place, key_codes, key_scales, head_step, V)


@triton.jit
def turn_queries(source, head_stride, cos, sin, token, first, out, V: tl.constexpr):
    head = first + tl.arange(0, V.some)
    column = tl.arange(0, V.padded)[None, :]
    present = head < V.heads
    turned = rotated(source + head * head_stride, present, cos, sin, token, V)
    place = out + (token * V.heads + head)[:, None] * V.width + column
    tl.store(place, turned, mask=present[:, None] & (column < V.width))


@triton.jit
def store_keys(source, head_stride, cos, sin, token, slot, place, codes, scales, head_step, V: tl.constexpr):
    KEY: tl.constexpr = V.key_side
    PADDED: tl.constexpr = V.padded
    head = tl.arange(0, V.kv_padded)
    present = (head < V.kv_heads) & (slot >= 0)
    numbers = rotated(source + head * head_stride, present, cos, sin, token, V).to(tl.float32)
    if KEY.turn:
        numbers = turn(numbers, PADDED, KEY)
    store_vectors(numbers, present, head.to(tl.int64) * head_step + place, codes, scales, PADDED, KEY)


@triton.jit
def store_values(source, head_stride, slot, place, codes, scales, head_step, V: tl.constexpr):
    VALUE: tl.constexpr = V.value_side
    PADDED: tl.constexpr = V.padded
    head = tl.arange(0, V.kv_padded)
    column = tl.arange(0, V.padded)[None, :]
    present = (head < V.kv_heads) & (slot >= 0)
    heads = source + (head * head_stride)[:, None] + column
    numbers = tl.load(heads, mask=present[:, None] & (column < V.width), other=0.0).to(tl.float32)
    store_vectors(numbers, present, head.to(tl.int64) * head_step + place, codes, scales, PADDED, VALUE)


@triton.jit
def rotated(source, present, cos, sin, token, V: tl.constexpr):
    """[heads, padded] of the dtype of the source, products and sums rounded to it; zeros beyond the heads."""
    dtype: tl.constexpr = source.dtype.element_ty
    column = tl.arange(0, V.padded)[None, :]
    inside = present[:, None] & (column < V.width)
    turns = column < 2 * V.half
    partner = tl.where(column < V.half, column + V.half, column - V.half)
    x = tl.load(source[:, None] + column, mask=inside, other=0.0)
    y = tl.load(source[:, None] + partner, mask=inside & turns, other=0.0)
    angle = token * V.half + column % V.half
    by_cos = tl.load(cos + angle, mask=turns, other=0.0).to(dtype).to(tl.float32) * x.to(tl.float32)
    by_sin = tl.load(sin + angle, mask=turns, other=0.0).to(dtype).to(tl.float32) * y.to(tl.float32)
    by_cos, by_sin = by_cos.to(dtype).to(tl.float32), by_sin.to(dtype).to(tl.float32)
    return tl.where(turns, tl.where(column < V.half, by_cos - by_sin, by_cos + by_sin).to(dtype), x)


def rotate_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: LayerPages
) -> Tensor:
    """Query [T, Q, D] turned; key and value [T, K, D] go to the pages, the keys turned; see the contract.

    A token whose slot is below 0 is not stored: padding of a captured step.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    plan(query, key, value, cos, sin, slots, pages, out).run()
    return out


def plan(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pages: LayerPages, out: Tensor
) -> Launch:
    """The launch that writes the turned queries to `out`, contiguous."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    variant = make_variant(query, cos, pages)
    arguments = (
        *(query, key, value, cos, sin, slots, out, *addresses(pages.keys), *addresses(pages.values)),
        *(stride for x in (query, key, value) for stride in x.stride()[:2]),
        *(pages.head_step, pages.block_step),
    )
    grid = (len(query), 2 + triton.cdiv(variant.heads, variant.some))
    return Launch(turn_and_store, grid, arguments, {"V": variant}, num_warps=4, fused=False)


def make_variant(query: Tensor, cos: Tensor, pages: LayerPages) -> Variant:
    """What the kernel is compiled for: shapes and formats."""
    _, heads, width = query.shape
    padded = max(NARROWEST, power_of_two(width))
    assembly = query.device.type != "cpu"
    return Variant(
        heads=heads,
        kv_heads=pages.num_kv_heads,
        kv_padded=power_of_two(pages.num_kv_heads),
        some=min(power_of_two(heads), max(1, NUMBERS // padded)),
        width=width,
        padded=padded,
        half=cos.shape[1],
        block_size=pages.block_size,
        key_side=stored(pages.keys.format, width, keys=True, assembly=assembly),
        value_side=stored(pages.values.format, width, keys=False, assembly=assembly),
    )
