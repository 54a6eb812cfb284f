"""The target's own first layers as a drafter: early exit into its norm and head, over its own KV pages.

Knows exits by their number of layers and how often each was right; verification writes the drafted keys again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..sequence import Sequence
from .ahead import Execute, draw_ahead
from .speculation import NO_DRAFT, Draft

MOST = 6
PROBES = 8  # proposals that each exit is tried for at first
PROBE_LENGTH = 2
PROBE_EVERY = 64  # proposals between trials of an exit while another, or none, is the best
WEIGHT = 0.02  # of a new observation


def exits_of(num_layers: int) -> tuple[int, ...]:
    """Layers behind which to leave: an eighth, a quarter, half and three quarters of them."""
    return tuple(sorted({max(1, num_layers * eighths // 8) for eighths in (1, 2, 4, 6)} - {num_layers}))


@dataclass(slots=True)
class ExitChoice:
    """Picks the exit and the length with the most tokens per cost; one full pass costs 1, an exit its share of it."""

    shares: Mapping[int, float]
    chances: dict[int, float] = field(default_factory=dict)  # that a drafted token is right
    rounds: int = 0

    def next(self) -> tuple[int, int]:
        """An exit and how many tokens to draft; 0 when none pays."""
        exits = list(self.shares)
        self.rounds += 1
        first = self.rounds <= PROBES * len(exits)
        if first or self.rounds % PROBE_EVERY == 0:
            turn = self.rounds if first else self.rounds // PROBE_EVERY
            return exits[turn % len(exits)], PROBE_LENGTH
        best = max((self.gain(exit_, k), exit_, k) for exit_ in exits for k in range(1, MOST + 1))
        return (best[1], best[2]) if best[0] > 1 else (exits[0], 0)

    def gain(self, exit_: int, length: int) -> float:
        """Expected tokens per cost of a step with such drafts, 1 without."""
        chance = self.chances.get(exit_, 0.0)
        return sum(chance**place for place in range(length + 1)) / (1 + length * self.shares[exit_])

    def observe(self, exit_: int, num_right: int, num_drafted: int) -> None:
        for place in range(min(num_right + 1, num_drafted)):
            known = self.chances.setdefault(exit_, 0.5)
            self.chances[exit_] = known + WEIGHT * ((place < num_right) - known)


class LayerSkipDrafter:
    """Drafts with the exit that pays most, for sequences whose keys but the newest token's are computed."""

    most = MOST
    writes_pages = True

    def __init__(self, exits: Mapping[int, Execute], num_layers: int) -> None:
        self._exits = exits
        self._choice = ExitChoice({exit_: exit_ / num_layers for exit_ in exits})

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        exit_, length = self._choice.next()
        able = [(sequence, min(most, length) if decodes(sequence) else 0) for sequence, most in wanted]
        found = draw_ahead(self._exits[exit_], able)
        chance = self._choice.chances.get(exit_, 0.5)
        return [Draft(tokens, (chance,) * len(tokens), exit_, "layer skip") if tokens else NO_DRAFT for tokens in found]

    def verified(self, draft: Draft, num_right: int) -> None:
        self._choice.observe(draft.match, num_right, len(draft.tokens))

    def ended(self, sequence: Sequence) -> None:
        return None


def decodes(sequence: Sequence) -> bool:
    """Its prompt is computed, and all of its answer but the newest token."""
    return sequence.pending == 1 and sequence.answer_length > 0
