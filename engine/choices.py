"""The probability of every choice from one pass over the trie of their tokens, and the choice it makes.

Pure Python on token ids and log-probabilities. A node of the trie is a start of some choice that something follows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

from .blocks import common_length
from .branches import Branches, branches_of

END = -1  # stands for all end tokens together
MOST_FED = 64  # tokens behind one prompt: wider tries are scored in parts

Node = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """Nodes that are scored by one sequence: what is fed behind the prompt, and behind which of it each node stands."""

    branches: Branches
    points: tuple[tuple[int, int], ...]  # (index of the token, -1 for the prompt's last; number of the node), rising


@dataclass(frozen=True, eq=False)
class ChoiceTrie:
    """The choices in the tokenizer's own spelling. `open_ended`: their text goes on in another choice's.

    The score of a choice is the sum of the log-probabilities of its tokens; an open-ended one needs an end token too.
    """

    options: tuple[tuple[int, ...], ...]
    open_ended: frozenset[int]

    @cached_property
    def nodes(self) -> list[Node]:
        """Starts of choices whose following token is scored, those with one start behind each other."""
        return sorted({node for steps in self._steps for node, _ in steps})

    @cached_property
    def wanted(self) -> list[list[int]]:
        """Per node the tokens, or END, whose log-probabilities are needed there."""
        found: dict[Node, set[int]] = {node: set() for node in self.nodes}
        for steps in self._steps:
            for node, token in steps:
                found[node].add(token)
        return [sorted(tokens) for tokens in found.values()]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The nodes by the sequences that score them: one, unless they are many."""
        number = {node: at for at, node in enumerate(self.nodes)}
        found = []
        for nodes in _groups(self.nodes):
            branches, ends = branches_of(nodes)
            found.append(Part(branches, tuple((ends[node], number[node]) for node in nodes)))
        return tuple(found)

    def probabilities(self, scores: Sequence[Sequence[float]]) -> list[float]:
        """Per choice, summing to 1. `scores`: log-probabilities in the order of `nodes` and `wanted`."""
        values = list(chain.from_iterable(scores))
        totals = [sum(values[place] for place in places) for places in self._places]
        best = max(totals)
        shares = [math.exp(total - best) for total in totals]
        whole = sum(shares)
        return [share / whole for share in shares]

    @cached_property
    def _places(self) -> list[list[int]]:
        """Per choice, where its log-probabilities stand among all of them."""
        firsts = accumulate(map(len, self.wanted), initial=0)
        place = {
            (node, token): first + at
            for node, first, tokens in zip(self.nodes, firsts, self.wanted, strict=False)
            for at, token in enumerate(tokens)
        }
        return [[place[step] for step in steps] for steps in self._steps]

    @cached_property
    def _steps(self) -> list[list[tuple[Node, int]]]:
        """Per choice the (node, token) pairs on its way, from where it is not every choice's: what all begin with is a
        factor of all scores.
        """
        tokens = [[*option, END] if at in self.open_ended else [*option] for at, option in enumerate(self.options)]
        first = min(common_length(min(tokens), max(tokens)), min(map(len, tokens)) - 1)
        return [[(tuple(row[:at]), row[at]) for at in range(first, len(row))] for row in tokens]


def choice_trie(texts: Sequence[str], options: Sequence[Sequence[int]]) -> ChoiceTrie:
    """The trie of choices with their texts."""
    ordered = sorted(range(len(texts)), key=texts.__getitem__)  # who goes on with a text stands right behind it
    open_ended = {first for first, second in pairwise(ordered) if texts[second].startswith(texts[first])}
    return ChoiceTrie(tuple(map(tuple, options)), frozenset(open_ended))


def _groups(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Neighbours, until MOST_FED tokens are fed for them; the way that is being gone then is gone to its end."""
    group, fed = [nodes[0]], len(nodes[0])
    for last, node in pairwise(nodes):
        goes_on = node[: len(last)] == last
        if fed >= MOST_FED and not goes_on:
            yield group
            group, fed = [], len(node)
        else:
            fed += len(node) - common_length(last, node)
        group.append(node)
    yield group
