"""Prompt lookup: what followed the last few tokens where they stood before in the row's own prompt and answer.

Knows one row's tokens; answers of other rows are the business of suffix.py.
"""

from array import array
from dataclasses import dataclass, field

from ..sequence import Sequence
from .speculation import NO_DRAFT, Draft

SIZES = (3, 2)  # tokens looked up, the more telling first
MOST = 32
DEEPEST = 64  # tokens of a match that are compared
LEAST_PATH = 0.1
REACH = 16_384  # tokens back that are searched: a search of more takes longer than a draft saves
ID = "I"  # a token id in the bytes of a text
WIDTH = array(ID).itemsize


@dataclass(slots=True)
class OwnText:
    """A list of tokens that only grows, as the bytes of its ids: their search is the fastest there is."""

    text: bytearray = field(default_factory=bytearray)

    def draft(self, tokens: list[int], most: int) -> Draft:
        """What followed the longest of the runs that end `tokens`, no longer than the match."""
        self.text += array(ID, tokens[len(self.text) // WIDTH :]).tobytes()
        for size in SIZES:
            end = self._latest(size)
            if end is not None:
                match = size + common_suffix(tokens, end - size, len(tokens) - size)
                found = tokens[end : end + min(most, match)]
                return cut_path(Draft(tuple(found), (match / (match + 1.5),) * len(found), match, "own text"))
        return NO_DRAFT

    def _latest(self, size: int) -> int | None:
        """Where the run of the last `size` tokens ended last before now, counted in tokens."""
        run, upto = self.text[-WIDTH * size :], len(self.text) - WIDTH
        first = max(0, upto - WIDTH * REACH)
        while (at := self.text.rfind(run, first, upto)) >= 0:
            if at % WIDTH == 0:
                return at // WIDTH + size
            upto = at + len(run) - 1  # bytes of neighbours that look like the run
        return None


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
