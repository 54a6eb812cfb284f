"""Ends JSON in time: near `max_tokens` an answer keeps only the tokens behind which it can still be closed.

Looks for a short way to a complete answer with llguidance's matcher; what that way writes is not known here.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from .grammar_search import Place, Search, Tokens, Words, among
from .grammar_state import Mask, MatcherState

MARGIN = 8  # tokens to spare beyond the way found, as one token can make it longer
MAX_WAY = 256  # tokens; an answer that takes more to close is not watched over
MAX_TRIED = 400  # tokens tried on a way where nothing closes; beyond that it takes the lowest one that may follow
FEW = 24  # tokens that may follow are looked at one by one, when there are no more than these
_CLOSING = b'"}]'
_ONWARD = (b",", b"0", b"null", b"true", b"false", b"[]", b"{}")  # the end of a number, and the shortest values


class Closing:
    """How many tokens close an answer of one tokenizer, and which tokens leave room for that."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens

    def narrowed(self, state: MatcherState, mask: Mask, left: int) -> Mask:
        """The part of `mask` behind which the answer can be closed within its `left` tokens; all when nothing can.

        Depends on the state and `left` alone, so that an answer stays the same in any company.
        """
        way = self._way(state.matcher)
        if way is None or len(way) > left or left > len(way) + MARGIN:
            return mask
        candidates = dict.fromkeys([*self._candidates(mask), *way[:1]])
        fitting = [token for token in candidates if self._fits(state.matcher, token, left - 1)]
        return self._only(mask, fitting) if fitting else mask

    def length(self, matcher: LLMatcher) -> int | None:
        """Tokens of a short way to a complete answer; None when none is found."""
        way = self._way(matcher)
        return None if way is None else len(way)

    def _way(self, matcher: LLMatcher) -> list[int] | None:
        ahead, search = matcher.deep_copy(), Search(MAX_TRIED)
        way: list[int] = []
        while not ahead.is_accepting():
            tokens = ahead.compute_ff_tokens() or list(self._next(Place(ahead), search))
            way += tokens
            if not tokens or len(way) > MAX_WAY or not ahead.consume_tokens(tokens):
                return None
        return way

    def _next(self, place: Place, search: Search) -> Sequence[int]:
        """What closes something, else what leads to where something can be closed, else the lowest token."""
        closing = self._closing_in(place.words)
        if closing:
            return closing[:1]
        found = search.elsewhere(place, self._onward) or search.nearest(place, self._characters, self._closing_in)
        return found.way if found else _allowed(place.words)[:1]

    def _fits(self, matcher: LLMatcher, token: int, left: int) -> bool:
        after = matcher.deep_copy()
        after.consume_token(token)
        length = None if after.is_error() else self.length(after)
        return length is not None and length <= left

    def _candidates(self, mask: Mask) -> Iterable[int]:
        """Tokens to look at, the best ones to close with first; all of them when they are few."""
        words = mask.view(np.uint32)
        allowed = _allowed(words)
        return [*self._closing_in(words), *(allowed if len(allowed) <= FEW else [])]

    def _closing_in(self, words: Words) -> list[int]:
        """The closing tokens among those of a mask, best first. In a text brackets are text, and a quote ends it."""
        found = among(self._closers, words)
        brackets = {self._texts[token] for token in found} >= {b"]", b"}"}
        return [token for token in found if self._texts[token].startswith(b'"')] if brackets else found

    @cached_property
    def _texts(self) -> dict[int, bytes]:
        """Every token's text."""
        return {token: self._tokens.decode_bytes([token]) for token in range(self._tokens.vocab_size)}

    @cached_property
    def _closers(self) -> Tokens:
        """What closes texts, arrays and objects, the longest first."""
        closing = [token for token, text in self._texts.items() if text and not text.strip(_CLOSING)]
        closing.sort(key=lambda token: (self._texts[token].startswith(b'"'), -len(self._texts[token])))
        return np.array(closing, np.int64)

    @cached_property
    def _onward(self) -> Tokens:
        return np.array([token for text in _ONWARD for token, held in self._texts.items() if held == text], np.int64)

    @cached_property
    def _characters(self) -> Tokens:
        """Single ones, without the backslash: behind it a quote is text."""
        characters = {bytes([code]) for code in range(32, 127)} - {b"\\"}
        return np.array([token for token, text in self._texts.items() if text in characters], np.int64)

    @staticmethod
    def _only(mask: Mask, tokens: Sequence[int]) -> Mask:
        words = np.zeros(len(mask), np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)


def _allowed(words: Words) -> list[int]:
    allowed: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return allowed
