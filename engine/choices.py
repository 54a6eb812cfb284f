"""The probability of every choice from one pass over the trie of their tokens, and the choice it makes.

Pure Python on token ids and log-probabilities. A node of the trie is a start of some choice that something follows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

END = -1  # stands for all end tokens together


@dataclass(frozen=True, eq=False)
class ChoiceTrie:
    """The choices in the tokenizer's own spelling. `open_ended`: their text goes on in another choice's.

    The score of a choice is the sum of the log-probabilities of its tokens; an open-ended one needs an end token too.
    """

    options: tuple[tuple[int, ...], ...]
    open_ended: frozenset[int]

    @cached_property
    def nodes(self) -> list[tuple[int, ...]]:
        """Starts of choices whose following token is scored, the shortest first."""
        return sorted({node for steps in self._steps for node, _ in steps}, key=lambda node: (len(node), node))

    @cached_property
    def wanted(self) -> list[list[int]]:
        """Per node the tokens, or END, whose log-probabilities are needed there."""
        found: list[set[int]] = [set() for _ in self.nodes]
        for steps in self._steps:
            for node, token in steps:
                found[self._place[node]].add(token)
        return [sorted(tokens) for tokens in found]

    def probabilities(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """Per choice, summing to 1. `scores`: log-probabilities in the order of `nodes` and `wanted`."""
        totals = [sum(self._score(scores, node, token) for node, token in steps) for steps in self._steps]
        best = max(totals)
        shares = [math.exp(total - best) for total in totals]
        return [share / sum(shares) for share in shares]

    def _score(self, scores: Sequence[Sequence[float]], node: tuple[int, ...], token: int) -> float:
        place = self._place[node]
        return scores[place][self.wanted[place].index(token)]

    @cached_property
    def _place(self) -> dict[tuple[int, ...], int]:
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def _steps(self) -> list[list[tuple[tuple[int, ...], int]]]:
        """Per choice the (node, token) pairs on its way, from where it is not every choice's: what all begin with is a
        factor of all scores.
        """
        tokens = [[*option, END] if at in self.open_ended else [*option] for at, option in enumerate(self.options)]
        first = min(common_length(tokens), min(map(len, tokens)) - 1)
        return [[(tuple(row[:at]), row[at]) for at in range(first, len(row))] for row in tokens]


def choice_trie(texts: Sequence[str], options: Sequence[Sequence[int]]) -> ChoiceTrie:
    """The trie of choices with their texts."""
    ordered = sorted(range(len(texts)), key=texts.__getitem__)  # who goes on with a text stands right behind it
    open_ended = {first for first, second in pairwise(ordered) if texts[second].startswith(texts[first])}
    return ChoiceTrie(tuple(map(tuple, options)), frozenset(open_ended))


def common_length(rows: Sequence[list[int]]) -> int:
    """How many leading tokens all rows have in common."""
    least, most = min(rows), max(rows)
    return next((at for at, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))
