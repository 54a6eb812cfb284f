"""Text of a growing token list, one token at a time, never showing half a character.

Knows a decode function only. A character whose bytes are split over tokens appears with its last byte.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
MAX_WINDOW = 64  # tokens without one whole character among them: garbage, cut so that time stays linear


class IncrementalText:
    """Appends tokens and hands out the text they complete; after `flush` the pieces joined equal the whole decode.

    Tokens since the last whole character are decoded together with those before them, because decoders treat the first
    token of a text differently (SentencePiece drops its leading space). Only the last replacement character of a text
    can still become something else.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # start of the tokens decoded for context
        self._whole = 0  # tokens that ended with a whole character
        self._handed_out = 0  # characters of the text from the context on

    def push(self, token: int) -> str:
        """Text completed by this token, "" while a character is still open."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._context :])
        is_open = text.endswith(REPLACEMENT)
        piece = self._hand_out(text[:-1] if is_open else text)
        if not is_open:
            self._move_context(self._whole)
            self._whole = len(self._tokens)
        elif len(self._tokens) - self._context > MAX_WINDOW:
            self._move_context(len(self._tokens) - MAX_WINDOW // 4)
        return piece

    def flush(self) -> str:
        """What is left when no token follows: an open character becomes a replacement character."""
        return self._hand_out(self._decode(self._tokens[self._context :]))

    def _hand_out(self, text: str) -> str:
        piece = text[self._handed_out :]
        self._handed_out = max(self._handed_out, len(text))
        return piece

    def _move_context(self, start: int) -> None:
        text = self._decode(self._tokens[start:])
        self._context = start
        self._handed_out = len(text[:-1] if text.endswith(REPLACEMENT) else text)
