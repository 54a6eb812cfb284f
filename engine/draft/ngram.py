"""Prompt lookup: what followed the last few tokens where they stood before in the row's own prompt and answer.

Knows one row's tokens; answers of other rows are the business of suffix.py.
"""

from dataclasses import dataclass, field

from ..sequence import Sequence
from .speculation import NO_DRAFT, Draft

SIZES = (3, 2)  # tokens looked up, the more telling first
MOST = 32
DEEPEST = 64  # tokens of a match that are compared
LEAST_PATH = 0.1


@dataclass(slots=True)
class OwnText:
    """Where each short run of tokens last ended, in a list of tokens that only grows."""

    places: tuple[dict[tuple[int, ...], int], ...] = field(default_factory=lambda: tuple({} for _ in SIZES))
    upto: int = 0

    def draft(self, tokens: list[int], most: int) -> Draft:
        """What followed the longest of the runs that end `tokens`, no longer than the match."""
        self._take(tokens)
        for size, places in zip(SIZES, self.places, strict=True):
            end = places.get(tuple(tokens[-size:]))
            if end is not None:
                match = size + common_suffix(tokens, end - size, len(tokens) - size)
                found = tokens[end : end + min(most, match)]
                return cut_path(Draft(tuple(found), (match / (match + 1.5),) * len(found), match, "own text"))
        return NO_DRAFT

    def _take(self, tokens: list[int]) -> None:
        """Notes the runs that end before the newest token."""
        for size, places in zip(SIZES, self.places, strict=True):
            start = max(0, self.upto - size + 1)
            part = tokens[start:-1]
            runs = zip(*(part[offset:] for offset in range(size)), strict=False)
            places.update((run, place) for place, run in enumerate(runs, start + size))
        self.upto = len(tokens) - 1


def common_suffix(tokens: list[int], first: int, second: int) -> int:
    """How many tokens before two places are equal, up to DEEPEST."""
    length, most = 0, min(first, DEEPEST)
    while length < most and tokens[first - length - 1] == tokens[second - length - 1]:
        length += 1
    return length


def cut_path(draft: Draft) -> Draft:
    """The draft up to where the chance of all of it falls below LEAST_PATH."""
    path = 1.0
    for place, chance in enumerate(draft.chances):
        path *= chance
        if path < LEAST_PATH:
            return draft.cut(place)
    return draft


class NgramDrafter:
    """Looks every sequence up in its own text."""

    most = MOST
    writes_pages = False

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        return [own_text(sequence).draft(sequence.tokens, most) for sequence, most in wanted]

    def verified(self, draft: Draft, num_right: int) -> None:
        return None

    def ended(self, sequence: Sequence) -> None:
        sequence.drafting = None


def own_text(sequence: Sequence) -> OwnText:
    """The index kept with the sequence, made when first asked for."""
    if sequence.drafting is None:
        sequence.drafting = OwnText()
    kept: OwnText = sequence.drafting
    return kept
