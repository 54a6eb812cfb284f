"""Looks ahead in a grammar: which token leads to another place in it, and which ones to a place that is wanted.

Tells places apart by the tokens that may follow there; which tokens close an answer is its caller's to say.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Words = NDArray[np.uint32]  # [W]: bit v % 32 of word v // 32 is 1 where token v may follow
Tokens = NDArray[np.int64]


def among(tokens: Tokens, words: Words) -> list[int]:
    """Those of `tokens` that may follow, in their order."""
    found: list[int] = tokens[(words[tokens // 32] >> (tokens % 32).astype(np.uint32)) & 1 > 0].tolist()
    return found


@dataclass(frozen=True)
class Place:
    """Where `way` leads from the place at which a search began."""

    matcher: LLMatcher
    way: tuple[int, ...] = ()

    @cached_property
    def mask(self) -> bytes:
        """What may follow; nothing where the answer is complete."""
        return b"" if self.matcher.is_accepting() else self.matcher.compute_bitmask()

    @property
    def words(self) -> Words:
        return np.frombuffer(self.mask, np.uint32)

    def after(self, token: int) -> "Place":
        """Behind a token that may follow, and behind all that has no alternative then."""
        matcher, way = self.matcher.deep_copy(), [*self.way, token]
        matcher.consume_token(token)
        while not matcher.is_accepting() and (forced := matcher.compute_ff_tokens()):
            matcher.consume_tokens(forced)
            way += forced
        return Place(matcher, tuple(way))


class Search:
    """The looks ahead on one answer's way: `tries` tokens are tried in all, then nothing is found any more."""

    def __init__(self, tries: int) -> None:
        self._tries = tries

    def elsewhere(self, start: Place, tokens: Tokens) -> Place | None:
        """Behind the first of `tokens` that changes what may follow, or leaves no alternative for what does."""
        steps = self._steps(start, tokens)
        return next((place for place in steps if len(place.way) > 1 or place.mask != start.mask), None)

    def nearest(self, start: Place, tokens: Tokens, wanted: Callable[[Words], object]) -> Place | None:
        """Breadth first, by `tokens` alone: where the answer is complete, or where something `wanted` may follow."""
        seen, reached = {start.mask}, deque([start])
        while reached:
            for place in self._steps(reached.popleft(), tokens):
                if place.mask in seen or place.matcher.is_error():
                    continue
                if not place.mask or wanted(place.words):
                    return place
                seen.add(place.mask)
                reached.append(place)
        return None

    def _steps(self, place: Place, tokens: Tokens) -> Iterator[Place]:
        for token in among(tokens, place.words):
            if not self._tries:
                return
            self._tries -= 1
            yield place.after(token)
