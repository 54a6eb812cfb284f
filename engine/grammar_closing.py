"""Ends JSON in time: near `max_tokens` an answer keeps only the tokens behind which it can still be closed.

Looks for a short way to a complete answer with llguidance's matcher; what that way writes is not known here.
"""

from collections.abc import Iterator, Sequence
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
        way = matcher.deep_copy()
        for length in range(MAX_WAY):
            if way.is_accepting():
                return length
            forced = way.compute_ff_tokens()
            token = forced[0] if forced else self._shortest(way)
            if token is None or not way.consume_token(token):
                return None
        return None

    def _fits(self, matcher: LLMatcher, token: int, left: int) -> bool:
        after = matcher.deep_copy()
        after.consume_token(token)
        length = None if after.is_error() else self.length(after)
        return length is not None and length <= left

    def _shortest(self, matcher: LLMatcher) -> int | None:
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        return next(self._candidates(mask), None)

    def _candidates(self, mask: Mask) -> Iterator[int]:
        """Tokens to look at, the best ones to close with first; all of them when they are few."""
        allowed = _ids(mask)
        if len(allowed) > FEW:
            allowed = allowed[:1]
        closing = [token for token in self._closers if _has(mask, token)]
        yield from dict.fromkeys([*closing, *allowed.tolist()])

    @cached_property
    def _closers(self) -> Sequence[int]:
        """Tokens that close texts, arrays and objects, the longest first, and then the shortest values."""
        texts = {token: self._tokens.decode_bytes([token]) for token in range(self._tokens.vocab_size)}
        closing = [token for token, text in texts.items() if text and not text.strip(_CLOSING)]
        values = [token for value in _SHORT_VALUES for token, text in texts.items() if text == value]
        return [*sorted(closing, key=lambda token: -len(texts[token])), *values]

    @staticmethod
    def _only(mask: Mask, tokens: Sequence[int]) -> Mask:
        words = np.zeros(len(mask), np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)


def _ids(mask: Mask) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _has(mask: Mask, token: int) -> bool:
    return bool(mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1))
