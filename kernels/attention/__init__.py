"""Paged attention over work items: the contract.

A work item is a run of cached keys together with the queries that may see them. A prefix shared by many sequences is
one item read once for all of them; a sequence's own suffix is another. A query appears in one or more items; its
partial results are merged by log-sum-exp in float32, which is exact.

    out[t] = softmax over all keys j of t's items with  j <= p(t)  and  j > p(t) - window   of  scale * q[t].k[j]

Sinks b[h], one learned logit for each query head, join the sum that the softmax divides by and nothing else, as if each
query saw one key more, whose value is zero (Xiao et al. 2023, "Efficient Streaming Language Models with Attention
Sinks"; learned for each head as in gpt-oss):

    out[t, h] = sum over j of exp(s[j]) v[j]  /  (exp(b[h]) + sum over j of exp(s[j]))

with s the scores, scaled and capped; b is neither scaled nor capped, and no window hides it. It counts once for a query
and head, however many items and partial results these have: where a result is whole, or where partial ones are merged.

query        [T, Q, D]      float32 or bfloat16 (float16: reference), position encoding applied, any strides
pages        LayerPages     keys and values in formats of kernels/kv_format, of [K, N, B] vectors; Q is a multiple of K.
                            Vectors are made of their codes as they are read, in the dtype of query, or products are
                            formed with the codes, no less exactly, and scaled; where the keys are turned, so is query,
                            in float32, and rounded to its dtype. Over int8 keys a bfloat16 query may be rounded more,
                            to whole multiples of 1/127 of the largest number of its token and head
out          [T, Q, D]      dtype of query, new

Keys of all fed tokens are written to the pages before attention runs. An item may be masked out whole for a query
(outside its window); every query sees at least its own key (a query in no item: ValueError). Slots that no item covers
may hold anything, NaN included, and never show. Scores and softmax are float32; with low precision operands the
probabilities, and the partial results that are merged, are rounded to the dtype of query.

`plan_attention` is called once per step, `attention` once per layer with the same plan; a plan serves one thread.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionItems:
    """The work items of one step in CSR form, on the host.

    Item i covers the keys at positions start[i] .. start[i] + length[i], held in
    blocks[block_offset[i] : block_offset[i+1]] (the first key at slot 0 of the first block), for the queries
    queries[query_offset[i] : query_offset[i+1]]: rows of the step, several of which may stand at one position, in
    branches of a sequence that forks.
    """

    start: Ints  # [I] position of the first key in its sequence
    length: Ints  # [I] keys
    block_offset: Ints  # [I+1]
    blocks: Ints  # [block_offset[I]]
    query_offset: Ints  # [I+1]
    queries: Ints  # [query_offset[I]]
    positions: Ints  # [T] position of every query in its sequence


@dataclass(frozen=True, slots=True)
class Masking:
    """What a layer does to the scores beyond causality."""

    scale: float
    window: int | None = None  # a query sees this many keys, itself included; None: all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap), before the mask
    sinks: "Tensor | None" = None  # [Q] float32, side by side, on the device of the query; None: none
