"""When an answer ends: end tokens, stop ids, stop strings across token edges, the token limit.

Pure Python on tokens and text. The text itself is cut later, by the same rule, where results are written.
"""

from collections.abc import Sequence
from typing import Protocol

from .detokenize import Decode, IncrementalText
from .request import FinishReason, Sampling


class StopSearch(Protocol):
    """Sees every token of one answer, in order; says whether a stop string is complete."""

    def push(self, token: int) -> bool: ...


class NoStops:
    """The search of an answer without stop strings."""

    def push(self, token: int) -> bool:
        return False


class StopStrings:
    """Says for every token whether a stop string ends in the text it completes, however tokens cut that text."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._text = IncrementalText(decode)
        self._end = ""  # the last characters, in which a stop string may have begun

    def push(self, token: int) -> bool:
        piece = self._text.push(token)
        if not piece:
            return False
        window, old = self._end + piece, len(self._end)
        self._end = window[-self._keep :] if self._keep else ""
        return any(window.find(stop, max(0, old - len(stop) + 1)) >= 0 for stop in self._stops)


def stop_search(sampling: Sampling, decode: Decode) -> StopSearch:
    return StopStrings(sampling.stop, decode) if sampling.stop else NoStops()


def end_tokens(sampling: Sampling, eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end an answer: the model's end tokens, unless ignored, and the request's own."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_ids


def finish_reason(
    token: int, answer_length: int, stopped_by_text: bool, sampling: Sampling, ends: frozenset[int]
) -> FinishReason | None:
    """Why the answer ends with its newest token, or None. Its first min_tokens tokens never end it."""
    if answer_length > sampling.min_tokens and (token in ends or stopped_by_text):
        return "stop"
    return "length" if answer_length >= sampling.max_tokens else None
