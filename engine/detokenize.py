"""Text of a growing token list, one token at a time, never showing half a character.

Knows a decode function only. A character whose bytes are split over tokens appears with its last byte.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"


class IncrementalText:
    """Appends tokens and hands out the text they complete; after `flush` the pieces joined equal the whole decode.

    Tokens since the last complete piece are decoded together with the piece before them, because decoders treat the
    first token of a text differently (SentencePiece drops its leading space).
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # start of the tokens decoded for context
        self._shown = 0  # tokens whose text was handed out

    def push(self, token: int) -> str:
        """Text completed by this token, "" while a character is still open."""
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """What is left when no token follows: an open character becomes replacement characters."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._tokens[self._context : self._shown])
        after = self._decode(self._tokens[self._context :])
        if after.endswith(REPLACEMENT) and not final:
            return ""
        if not after.startswith(before) or len(after) == len(before):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]
