"""Medusa heads as a drafter: each reads the state behind the newest token's place and guesses one token further.

Knows how many heads there are and how often each was right; what they compute is handed in ready to run.
"""

from typing import Protocol

from ..sequence import Sequence
from .ahead import Execute, draw_ahead
from .speculation import NO_DRAFT, Draft

WEIGHT = 0.02  # of a new observation
CHANCE = 0.5  # of a head that has not been tried


class Heads(Execute, Protocol):
    """Heads as a model: the point behind a draft of k tokens is drawn by head k."""

    @property
    def num_heads(self) -> int: ...

    def sees(self, sequence: Sequence) -> bool:
        """The step before drew the sequence's newest token, so its state is there."""
        ...


class MedusaDrafter:
    """Drafts one token per head, for every sequence whose newest token was drawn in the step before."""

    writes_pages = False

    def __init__(self, heads: Heads) -> None:
        self.most = heads.num_heads
        self._heads = heads
        self._chances = [CHANCE] * heads.num_heads

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        able = [(sequence, most if self._heads.sees(sequence) else 0) for sequence, most in wanted]
        return [self._draft(tokens) for tokens in draw_ahead(self._heads, able)]

    def verified(self, draft: Draft, num_right: int) -> None:
        for head in range(min(num_right + 1, len(draft.tokens))):
            self._chances[head] += WEIGHT * ((head < num_right) - self._chances[head])

    def ended(self, sequence: Sequence) -> None:
        return None

    def _draft(self, tokens: tuple[int, ...]) -> Draft:
        return Draft(tokens, tuple(self._chances[: len(tokens)]), 0, "heads") if tokens else NO_DRAFT
