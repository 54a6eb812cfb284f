"""Paged attention in Triton: one kernel for prompts, decoding and verification, and the merge of its partial results.

Knows tasks, pages and masks, not how tasks are chosen. A program attends a run of queries, times the query heads of one
key/value head, over a run of keys. Scores are in units of log2, so that probabilities are powers of two.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..kv_format.gpu import Stored, hadamard, load_codes, load_scale, part_numbers

TASK_FIELDS = 5
MERGE_FIELDS = 3
FIELDS, MERGE = tl.constexpr(TASK_FIELDS), tl.constexpr(MERGE_FIELDS)
LOG2_E = 1.4426950408889634
SINK_UNIT = tl.constexpr(LOG2_E)


@dataclass(frozen=True, slots=True)
class Variant:
    """What `attend` is compiled for."""

    heads: int
    kv_heads: int
    width: int
    padded: int
    block_size: int
    rows: int  # queries times query heads of a key/value head, in one product
    keys: int  # of one step of the loop
    window: bool
    softcap: bool
    sinks: bool
    split: bool  # keys that all queries see are walked without a mask, in a loop of their own
    key_side: Stored  # not `key` and `value`: Triton reads `.value` of a constant as the constant
    value_side: Stored
    raised: float  # weights are in units of 2^-raised

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@triton.jit
def attend(
    query, out, partials, sums, key_codes, key_scales, value_codes, value_scales,
    tasks, rows, positions, places, blocks,
    query_stride, query_head_stride, head_step, block_step, scale, softcap, window, sinks, V: tl.constexpr,
):  # fmt: skip
    """A task of the table (first entry, queries, first block, keys, position of the first key) and one key head."""
    task = tasks + tl.program_id(0) // V.kv_heads * FIELDS
    head = tl.program_id(0) % V.kv_heads
    count = tl.load(task + 1)
    if count == 0:
        return
    index = tl.arange(0, V.rows) // V.group
    query_head = head * V.group + tl.arange(0, V.rows) % V.group
    live = index < count
    entry = tl.load(task) + index
    row = tl.load(rows + entry, mask=live, other=0).to(tl.int64)
    limit = tl.load(positions + entry, mask=live, other=-1) - tl.load(task + 4)  # last key seen, counted in the task
    q0, q1 = load_query(query + row * query_stride + query_head * query_head_stride, live, V)
    num_keys = tl.load(task + 3)
    last = tl.max(limit, 0)
    lowest = tl.min(tl.where(live, limit, last), 0)
    begin, end = 0, tl.maximum(tl.minimum(last + 1, num_keys), 0)
    if V.window:
        begin = tl.minimum(tl.maximum(lowest - window + 1, 0) // V.keys * V.keys, end)
    pages = (key_codes, key_scales, value_codes, value_scales)
    where = (tl.load(task + 2) + blocks, head * head_step, block_step, num_keys, limit, window)
    state = fresh(V)
    if V.split:
        whole = begin
        if V.window:
            whole = tl.minimum((tl.maximum(last - window + 1, 0) + V.keys - 1) // V.keys * V.keys, end)
            state = walk(state, begin, whole, q0, q1, pages, where, scale, softcap, True, V)
        begin = tl.maximum(tl.minimum(lowest + 1, num_keys) // V.keys * V.keys, whole)
        state = walk(state, whole, begin, q0, q1, pages, where, scale, softcap, False, V)
    state = walk(state, begin, end, q0, q1, pages, where, scale, softcap, True, V)
    place = tl.load(places + entry, mask=live, other=-1).to(tl.int64)
    if q0.dtype.primitive_bitwidth == 16 and not V.value_side.halves:  # others have no registers for a second reading
        row = tl.load(rows + entry, mask=live, other=0, volatile=True).to(tl.int64)  # else it is kept on the stack
    finish(state, live, row * V.heads + query_head, place, query_head, out, partials, sums, sinks, V)


@triton.jit
def fresh(V: tl.constexpr):
    """Largest score, sum of weights, weighed sums of the value's parts and of the least numbers of those.

    Sums of a part that there is not, and least numbers that formats do not have, stay as they are.
    """
    nothing = tl.full([V.rows], 0.0, tl.float32)
    values = tl.full([V.rows, V.value_side.padded], 0.0, tl.float32)
    return tl.full([V.rows], float("-inf"), tl.float32), nothing, values, values, nothing, nothing


@triton.jit
def load_query(source, live, V: tl.constexpr):
    """The queries in the parts of the keys, turned as these are; a second part only where keys have two."""
    column = tl.arange(0, V.padded)
    query = tl.load(source[:, None] + column[None, :], mask=live[:, None] & (column < V.width)[None, :], other=0.0)
    KEY: tl.constexpr = V.key_side
    PADDED: tl.constexpr = V.padded
    first, second = query, query
    if KEY.halves:
        factor: tl.constexpr = KEY.turn_factor
        left = tl.dot(query, hadamard(PADDED, 0, KEY).to(query.dtype), input_precision="tf32x3")
        right = tl.dot(query, hadamard(PADDED, 1, KEY).to(query.dtype), input_precision="tf32x3")
        first, second = (left * factor).to(query.dtype), (right * factor).to(query.dtype)
    return first, second


@triton.jit
def walk(state, begin, end, q0, q1, pages, where, scale, softcap, MASKED: tl.constexpr, V: tl.constexpr):
    """Takes the keys begin .. end into the running softmax. Block ids are read one step ahead."""
    KEY: tl.constexpr = V.key_side
    VALUE: tl.constexpr = V.value_side
    most, total, acc0, acc1, least0, least1 = state
    table, head_slot, block_step, num_keys, limit, window = where
    lane = tl.arange(0, V.keys)
    block = tl.load(table + (begin + lane) // V.block_size, mask=begin + lane < num_keys, other=0)
    for start in range(begin, end, V.keys):
        key = start + lane
        slot = (head_slot + block * block_step + key % V.block_size).to(tl.int64)
        block = tl.load(table + (key + V.keys) // V.block_size, mask=key + V.keys < num_keys, other=0)
        scores = score(q0, q1, pages[0], pages[1], slot, key < num_keys, MASKED, KEY)
        factor = scale  # of the largest product too: it is positive
        if V.softcap:
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores * scale))
            factor = 1.0
        if MASKED:
            seen = (key[None, :] <= limit[:, None]) & (key < num_keys)[None, :]
            if V.window:
                seen = seen & (key[None, :] > limit[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1) * factor)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(most - base)
        weights = tl.exp2(scores * factor - (base - V.raised)[:, None])
        total = total * decay + tl.sum(weights, 1)
        sums = (acc0 * decay[:, None], acc1, least0, least1)
        acc0, acc1, least0, least1 = add_values(
            weights, decay, sums, pages[2], pages[3], slot, key < num_keys, q0.dtype, MASKED, VALUE
        )
        most = higher
    return most, total, acc0, acc1, least0, least1


@triton.jit
def score(q0, q1, codes, scales, slot, inside, MASKED: tl.constexpr, S: tl.constexpr):
    """Products [rows, keys] of queries and keys, float32."""
    read = load_codes(codes, slot, inside, S, MASKED)
    scores = tl.dot(q0, tl.trans(part_numbers(read, scales, slot, inside, 0, q0.dtype, S)), input_precision="tf32x3")
    if S.folds:
        scores *= load_scale(scales, slot, inside, 0, S, MASKED)[None, :]
    if S.halves:
        numbers = tl.trans(part_numbers(read, scales, slot, inside, 1, q0.dtype, S))
        if S.folds:
            groups: tl.constexpr = S.num_scales // 2
            other = tl.dot(q1, numbers, input_precision="tf32x3")
            scores += other * load_scale(scales, slot, inside, groups - 1, S, MASKED)[None, :]
            least0 = load_scale(scales, slot, inside, groups, S, MASKED)
            least1 = load_scale(scales, slot, inside, 2 * groups - 1, S, MASKED)
            scores += tl.sum(q0.to(tl.float32), 1)[:, None] * least0[None, :]
            scores += tl.sum(q1.to(tl.float32), 1)[:, None] * least1[None, :]
        else:
            scores = tl.dot(q1, numbers, scores, input_precision="tf32x3")
    return scores


@triton.jit
def add_values(
    weights, decay, sums, codes, scales, slot, inside, dtype: tl.constexpr, MASKED: tl.constexpr, S: tl.constexpr
):
    """The sums (the first decayed already) with the values of one step, weighed."""
    acc0, acc1, least0, least1 = sums
    read = load_codes(codes, slot, inside, S, MASKED)
    first = weights
    if S.folds:
        first = weights * load_scale(scales, slot, inside, 0, S, MASKED)[None, :]
    numbers = part_numbers(read, scales, slot, inside, 0, dtype, S)
    acc0 = tl.dot(first.to(dtype), numbers, acc0, input_precision="tf32x3")
    if S.parts == 2:
        second = first if S.pairs else weights
        if S.folds and S.halves:
            groups: tl.constexpr = S.num_scales // 2
            second = weights * load_scale(scales, slot, inside, groups - 1, S, MASKED)[None, :]
            least = load_scale(scales, slot, inside, groups, S, MASKED)
            least0 = least0 * decay + tl.sum(weights * least[None, :], 1)
            least = load_scale(scales, slot, inside, 2 * groups - 1, S, MASKED)
            least1 = least1 * decay + tl.sum(weights * least[None, :], 1)
        numbers = part_numbers(read, scales, slot, inside, 1, dtype, S)
        acc1 = tl.dot(second.to(dtype), numbers, acc1 * decay[:, None], input_precision="tf32x3")
    return acc0, acc1, least0, least1


@triton.jit
def finish(state, live, out_row, place, query_head, out, partials, sums, sinks, V: tl.constexpr):
    """Results to `out` where they are whole (place < 0), else to the partial ones with their log-sum-exp."""
    most, total, acc0, acc1, least0, least1 = state
    kept = live & (place >= 0)
    whole = total
    if V.sinks:
        sink = tl.load(sinks + query_head, mask=live & (kept == 0), other=float("-inf"))
        whole += tl.exp2(sink * SINK_UNIT - (most - V.raised))
    share = tl.where(total == 0.0, 0.0, 1.0 / whole)
    partial_row = place * V.heads + query_head
    store_part(acc0, least0, share, out_row, partial_row, live, kept, out, partials, 0, V)
    if V.value_side.parts == 2:
        store_part(acc1, least1, share, out_row, partial_row, live, kept, out, partials, 1, V)
    tl.store(sums + partial_row, tl.where(total == 0.0, float("-inf"), most + tl.log2(total) - V.raised), mask=kept)


@triton.jit
def store_part(acc, least, share, out_row, partial_row, live, kept, out, partials, PART: tl.constexpr, V: tl.constexpr):
    column = tl.arange(0, V.value_side.padded)
    element = PART * V.value_side.begin + column * V.value_side.spread
    within = (column < V.value_side.part_width) & (element < V.width)
    result = ((acc + least[:, None]) * share[:, None]).to(out.dtype.element_ty)
    to_out = out + out_row[:, None] * V.width + element[None, :]
    tl.store(to_out, result, mask=(live & (kept == 0))[:, None] & within[None, :])
    to_partial = partials + partial_row[:, None] * V.width + element[None, :]
    tl.store(to_partial, result, mask=kept[:, None] & within[None, :])


@triton.jit
def merge(
    out, partials, sums, merges, sinks,
    HEADS: tl.constexpr, SOME: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Partial results of a query (row, first, count of the table), weighed by their shares of the whole sum."""
    entry = merges + tl.program_id(0) * MERGE
    row, first, count = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64), tl.load(entry + 2)
    if count == 0:
        return
    head = tl.program_id(1) * SOME + tl.arange(0, SOME)
    column = tl.arange(0, PADDED)
    within = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    place = head[:, None] * WIDTH + column[None, :]
    most = tl.full([SOME], float("-inf"), tl.float32)
    for part in range(count):
        most = tl.maximum(most, tl.load(sums + (first + part) * HEADS + head, mask=head < HEADS, other=0.0))
    total = tl.full([SOME], 0.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=head < HEADS, other=0.0) * SINK_UNIT
        most = tl.maximum(most, sink)
        total = tl.exp2(sink - most)
    acc = tl.full([SOME, PADDED], 0.0, tl.float32)
    for part in range(count):
        share = tl.exp2(tl.load(sums + (first + part) * HEADS + head, mask=head < HEADS, other=0.0) - most)
        result = tl.load(partials + (first + part) * (HEADS * WIDTH) + place, mask=within, other=0.0)
        total += share
        acc += share[:, None] * result.to(tl.float32)
    acc = acc / total[:, None]
    tl.store(out + row * (HEADS * WIDTH) + place, acc.to(out.dtype.element_ty), mask=within)
