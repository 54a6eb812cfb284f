"""Ends JSON in time: near `max_tokens` an answer keeps only the tokens behind which it can still be closed.

Looks for a short way to a complete answer with llguidance's matcher; what that way writes is not known here.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from .grammar_state import Mask, MatcherState

MARGIN = 8  # tokens to spare beyond the way found, as one token can make it longer
MAX_WAY = 256  # tokens; an answer that takes more to close is not watched over
FEW = 24  # tokens that may follow are looked at one by one, when there are no more than these
_CLOSING = b'"}]'
_SHORT_VALUES = (b"0", b"null", b"true", b"false", b'""', b"[]", b"{}")


class Closing:
    """How many tokens close an answer of one tokenizer, and which tokens leave room for that."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens

    def narrowed(self, state: MatcherState, mask: Mask, left: int) -> Mask:
        """The part of `mask` behind which the answer can be closed within its `left` tokens; all when nothing can.

        Depends on the state and `left` alone, so that an answer stays the same in any company.
        """
        length = self.length(state.matcher)
        if length is None or length > left or left > length + MARGIN:
            return mask
        fitting = [token for token in self._candidates(mask) if self._fits(state.matcher, token, left - 1)]
        return self._only(mask, fitting) if fitting else mask

    def length(self, matcher: LLMatcher) -> int | None:
        """Tokens of a short way to a complete answer; None when none is found."""
        way, length = matcher.deep_copy(), 0
        while not way.is_accepting():
            tokens = way.compute_ff_tokens() or self._shortest(way)
            length += len(tokens)
            if not tokens or length > MAX_WAY or not way.consume_tokens(tokens):
                return None
        return length

    def _fits(self, matcher: LLMatcher, token: int, left: int) -> bool:
        after = matcher.deep_copy()
        after.consume_token(token)
        length = None if after.is_error() else self.length(after)
        return length is not None and length <= left

    def _shortest(self, matcher: LLMatcher) -> list[int]:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        closing = self._closing_in(mask)
        if closing:
            return [closing[0]]
        words = np.flatnonzero(mask)
        word = int(mask[words[0]]) if len(words) else 0
        return [32 * int(words[0]) + (word & -word).bit_length() - 1] if word else []

    def _candidates(self, mask: Mask) -> Iterable[int]:
        """Tokens to look at, the best ones to close with first; all of them when they are few."""
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        few = allowed if len(allowed) <= FEW else []
        return dict.fromkeys([*self._closing_in(mask.view(np.uint32)), *few])

    def _closing_in(self, words: NDArray[np.uint32]) -> list[int]:
        """The closing tokens among those of a mask, best first. In a text brackets are text, and a quote ends it."""
        found: list[int] = self._closers[
            (words[self._closers // 32] >> (self._closers % 32).astype(np.uint32)) & 1 > 0
        ].tolist()
        brackets = {self._texts[token] for token in found} >= {b"]", b"}"}
        return [token for token in found if self._texts[token].startswith(b'"')] if brackets else found

    @cached_property
    def _texts(self) -> dict[int, bytes]:
        """What closes texts, arrays and objects, the longest first, and then the shortest values."""
        texts = {token: self._tokens.decode_bytes([token]) for token in range(self._tokens.vocab_size)}
        closing = [token for token, text in texts.items() if text and not text.strip(_CLOSING)]
        closing.sort(key=lambda token: (texts[token].startswith(b'"'), -len(texts[token])))
        values = [token for value in _SHORT_VALUES for token, text in texts.items() if text == value]
        return {token: texts[token] for token in [*closing, *values]}

    @cached_property
    def _closers(self) -> NDArray[np.int64]:
        return np.array(list(self._texts), np.int64)

    @staticmethod
    def _only(mask: Mask, tokens: Sequence[int]) -> Mask:
        words = np.zeros(len(mask), np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)
