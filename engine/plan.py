"""The order in which requests share most: a depth-first walk of the trie of their prompts.

Knows token ids only. Equal prefixes become adjacent, equal prompts keep their input order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
Indices = NDArray[np.int64]

_STRIDES = (4, 16, 64, 256)  # tokens compared at once, more as prefixes turn out to be long
_TOKENS_AT_ONCE = 1 << 18  # so that comparing needs a few megabytes, whatever the number of prompts
_END = np.uint64(0)  # sorts before every token: a prompt comes before those it is a prefix of


@dataclass(frozen=True, slots=True)
class Plan:
    """`order[i]` is the index of a prompt; `common[i]` the length of its common prefix with that of `order[i - 1]`.

    `common[0]` is 0. `distinct_tokens` is the number of nodes of the prompt trie, |T|: no schedule computes fewer.
    """

    order: Indices
    common: Indices
    distinct_tokens: int


def plan(prompts: Sequence[Sequence[int]]) -> Plan:
    """Orders prompts given as lists of token ids (0 <= id < 2**32 - 1)."""
    lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
    tokens = np.fromiter(chain.from_iterable(prompts), np.uint32, int(lengths.sum()))
    return plan_tokens(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def plan_tokens(tokens: Tokens, offsets: Indices) -> Plan:
    """Orders prompts stored one after another: prompt i is tokens[offsets[i]:offsets[i + 1]]."""
    order = _sort(tokens, offsets)
    common = np.zeros(len(order), np.int64)
    common[1:] = _common_prefix(tokens, offsets, order[:-1], order[1:])
    lengths = offsets[1:] - offsets[:-1]
    return Plan(order, common, int(lengths.sum() - common.sum()))


def _sort(tokens: Tokens, offsets: Indices) -> Indices:
    """Lexicographic order by repeated refinement: each round looks at two tokens behind a group's common prefix."""
    order = np.arange(len(offsets) - 1, dtype=np.int64)
    depth = np.zeros(len(order), np.int64)  # of the group that stands at a place of `order`
    places = np.arange(len(order), dtype=np.int64) if len(order) > 1 else np.zeros(0, np.int64)
    starts = np.zeros(len(order), bool)  # whether a group starts at a place
    starts[:1] = True
    while len(places):
        _skip_common(tokens, offsets, order, depth, places, starts)
        rows = order[places]
        keys = _pair_keys(tokens, offsets, rows, depth[places])
        groups = np.cumsum(starts[places])
        sorting = np.lexsort((keys, groups))
        order[places] = rows[sorting]
        keys = keys[sorting]
        starts[places[1:]] |= keys[1:] != keys[:-1]
        depth[places] += 2
        places = _unsettled(places, starts, keys)
    return order


def _unsettled(places: Indices, starts: NDArray[np.bool_], keys: NDArray[np.uint64]) -> Indices:
    """Places of groups that have several rows and whose rows have not ended."""
    first = starts[places]
    last = np.append(first[1:], True)
    open_ended = (keys & np.uint64(0xFFFFFFFF)) != _END
    unsettled: Indices = places[~(first & last) & open_ended]
    return unsettled


def _skip_common(
    tokens: Tokens,
    offsets: Indices,
    order: Indices,
    depth: Indices,
    places: Indices,
    starts: NDArray[np.bool_],
) -> None:
    """Moves each group's depth to the end of the prefix that all its rows have in common."""
    group = np.cumsum(starts[places]) - 1
    heads = order[places[starts[places]]]
    common = _common_prefix(tokens, offsets, heads[group], order[places], depth[places])
    shortest = np.full(len(heads), np.iinfo(np.int64).max)
    np.minimum.at(shortest, group, common)
    depth[places] = shortest[group]


def _pair_keys(tokens: Tokens, offsets: Indices, rows: Indices, depth: Indices) -> NDArray[np.uint64]:
    """Two tokens of each row from `depth` on as one number that sorts as they do."""
    first = _tokens_at(tokens, offsets, rows, depth)
    second = _tokens_at(tokens, offsets, rows, depth + 1)
    return (first << np.uint64(32)) | second


def _tokens_at(tokens: Tokens, offsets: Indices, rows: Indices, depth: Indices) -> NDArray[np.uint64]:
    """Token id + 1 at `depth` of each row, 0 behind its end."""
    at = offsets[rows] + depth
    inside = at < offsets[rows + 1]
    values = np.zeros(len(rows), np.uint64)
    values[inside] = tokens[at[inside]].astype(np.uint64) + np.uint64(1)
    return values


def _common_prefix(
    tokens: Tokens, offsets: Indices, left: Indices, right: Indices, known: Indices | None = None
) -> Indices:
    """Length of the common prefix of prompts left[i] and right[i], of which `known[i]` tokens are equal already."""
    common = np.zeros(len(left), np.int64) if known is None else known.copy()
    limit = np.minimum(offsets[left + 1] - offsets[left], offsets[right + 1] - offsets[right])
    starts = (offsets[left], offsets[right])
    going = np.flatnonzero(common < limit)
    strides = chain(_STRIDES, repeat(_STRIDES[-1]))
    while len(going):
        stride = next(strides)
        size = _TOKENS_AT_ONCE // stride
        parts = [going[start : start + size] for start in range(0, len(going), size)]
        going = np.concatenate([_extend(tokens, *starts, limit, common, part, stride) for part in parts])
    return common


def _extend(
    tokens: Tokens, left: Indices, right: Indices, limit: Indices, common: Indices, pairs: Indices, stride: int
) -> Indices:
    """Lengthens `common` of some pairs in place by up to `stride` tokens; the pairs that may be equal beyond."""
    at = common[pairs, None] + np.arange(stride)
    inside = at < limit[pairs, None]
    at = np.where(inside, at, 0)
    equal = (tokens[left[pairs, None] + at] == tokens[right[pairs, None] + at]) & inside
    gained = np.where(equal.all(axis=1), stride, np.argmin(equal, axis=1))
    common[pairs] += gained
    going: Indices = pairs[(gained == stride) & (common[pairs] < limit[pairs])]
    return going
