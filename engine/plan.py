"""The order in which requests share most: a depth-first walk of the trie of their prompts.

Knows token ids only. Equal prefixes become adjacent, equal prompts keep their input order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]
Indices = NDArray[np.int64]
Truths = NDArray[np.bool_]

_WIDTH = 64  # tokens of each prompt that one round of sorting looks at
_KEYS_AT_ONCE = 1 << 22  # tokens of all prompts in a round, so that it needs some 40 MB
_COPIED_AT_ONCE = 1 << 18


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
    """Orders prompts stored one after another: prompt i is tokens[offsets[i]:offsets[i + 1]].

    Sorts by the next tokens of every prompt, round after round; from the second round on only groups of prompts that
    are equal so far take part, each kept together by its number in front of the key.
    """
    lengths = offsets[1:] - offsets[:-1]
    order = np.arange(len(lengths), dtype=np.int64)
    common = np.zeros(len(lengths), np.int64)
    places, groups, depth = order.copy(), np.zeros(len(order), np.uint32), 0
    while len(places) > 1 and len(tokens):
        width = max(1, min(_WIDTH, len(tokens), _KEYS_AT_ONCE // len(places)))
        rows = order[places]
        keys = _keys(tokens, offsets[rows] + depth, lengths[rows] - depth, groups, width)
        sorting = np.argsort(keys.view(f"U{width + 1}")[:, 0], kind="stable")
        keys, rows = keys[sorting], rows[sorting]
        order[places] = rows
        at, equal = _differences(keys)
        alike = equal | (at > 0)  # of the same group, so their common prefix is known by this round or a later one
        common[places[1:][alike]] = np.minimum(depth + np.where(equal, width, at - 1), lengths[rows[1:]])[alike]
        places, groups = _unsettled(places, equal & (keys[1:, -1] != 0))
        depth += width
    return Plan(order, common, int(lengths.sum() - common.sum()))


def _keys(tokens: Tokens, starts: Indices, left: Indices, groups: NDArray[np.uint32], width: int) -> Tokens:
    """One row for each prompt: its group, then token + 1 of the next `width` tokens, 0 behind its end.

    So a prompt comes before those it is a prefix of. Taken as text of as many characters, rows sort by their numbers.
    """
    keys = np.empty((len(starts), width + 1), np.uint32)
    keys[:, 0] = groups
    windows = np.lib.stride_tricks.sliding_window_view(tokens, width)
    step = max(1, _COPIED_AT_ONCE // width)
    for first in range(0, len(starts), step):
        part, ahead = keys[first : first + step, 1:], left[first : first + step, None]
        part[:] = windows[np.minimum(starts[first : first + step], len(windows) - 1)]
        part += np.uint32(1)
        part *= np.arange(width) < ahead
    for row in np.flatnonzero(starts >= len(windows)):  # the few at the end of all tokens
        rest = tokens[starts[row] : starts[row] + left[row]]
        keys[row, 1:] = 0
        keys[row, 1 : 1 + len(rest)] = rest + np.uint32(1)
    return keys


def _differences(keys: Tokens) -> tuple[Indices, Truths]:
    """Where each row but the first differs from the one before, and whether it does not at all."""
    at, equal = np.zeros(len(keys) - 1, np.int64), np.zeros(len(keys) - 1, bool)
    step = max(1, _COPIED_AT_ONCE // keys.shape[1])
    for first in range(0, len(at), step):
        last = min(first + step, len(at))
        different = keys[first + 1 : last + 1] != keys[first:last]
        at[first:last], equal[first:last] = different.argmax(axis=1), ~different.any(axis=1)
    return at, equal


def _unsettled(places: Indices, tied: Truths) -> tuple[Indices, NDArray[np.uint32]]:
    """Places whose prompt is equal so far to a neighbour's, neither having ended; and the groups they form."""
    starts, kept = np.ones(len(places), bool), np.zeros(len(places), bool)
    starts[1:] = ~tied
    kept[1:] = tied
    kept[:-1] |= tied
    return places[kept], np.cumsum(starts)[kept].astype(np.uint32)


def common_prefix(first: Tokens, second: Tokens) -> int:
    """How many leading tokens of two prompts are equal."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
