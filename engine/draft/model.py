"""A smaller model, or the target's own INT4 copy, as a drafter with KV pages of its own behind the same block ids.

Knows how far its pages follow each sequence; whether two tokenizers are one is checked where the model is loaded.
"""

from dataclasses import dataclass

from ..sequence import Feed, Sequence, Step
from .ahead import Execute, draw_ahead
from .layer_skip import decodes
from .speculation import NO_DRAFT, Draft

CATCH_UP = 2048  # tokens of prompts and answers computed per step beside the drafts
CHANCE = 0.7


@dataclass(slots=True)
class Followed:
    """How many tokens of a sequence have keys in the draft model's pages, under the block list they were put in."""

    blocks: list[int]
    computed: int = 0
    drafted: tuple[int, ...] = ()  # behind them, of the last proposal

    def advance(self, tokens: list[int]) -> None:
        """Of the last draft, what turned out right has its keys, but for the last token drawn."""
        for token in self.drafted[:-1]:
            if self.computed >= len(tokens) or tokens[self.computed] != token:
                break
            self.computed += 1
        self.drafted = ()


class ModelDrafter:
    """`context` is the draft model's own limit; behind it nothing is drafted."""

    writes_pages = True

    def __init__(self, model: Execute, num_tokens: int, context: int) -> None:
        self.most = num_tokens
        self._model = model
        self._context = context

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        followed = [self._follow(sequence) for sequence, _ in wanted]
        room = [min(most, self._context - len(sequence.tokens)) for sequence, most in wanted]
        self._catch_up([(s, f) for (s, _), f, most in zip(wanted, followed, room, strict=True) if most > 0])
        able = [
            (sequence, most if state.computed == len(sequence.tokens) - 1 and decodes(sequence) else 0)
            for (sequence, _), state, most in zip(wanted, followed, room, strict=True)
        ]
        found = draw_ahead(self._model, able)
        for (sequence, _), state, tokens in zip(able, followed, found, strict=True):
            if tokens:
                state.computed, state.drafted = len(sequence.tokens), tokens
        return [Draft(tokens, (CHANCE,) * len(tokens), 0, "draft model") if tokens else NO_DRAFT for tokens in found]

    def verified(self, draft: Draft, num_right: int) -> None:
        return None

    def ended(self, sequence: Sequence) -> None:
        sequence.drafting = None

    def _follow(self, sequence: Sequence) -> Followed:
        """What is known of a sequence; nothing after a preemption, which gave its blocks away."""
        state = sequence.drafting
        if not isinstance(state, Followed) or state.blocks is not sequence.blocks:
            state = sequence.drafting = Followed(sequence.blocks)
        state.advance(sequence.tokens)
        return state

    def _catch_up(self, behind: list[tuple[Sequence, Followed]]) -> None:
        """Computes the keys of tokens that came without drafts, a bounded number per step, in plan order."""
        budget, feeds = CATCH_UP, []
        for sequence, state in behind:
            count = min(len(sequence.tokens) - 1 - state.computed, budget)
            if count > 0 and decodes(sequence):
                feeds.append(Feed(sequence, state.computed, count))
                state.computed += count
                budget -= count
        if feeds:
            self._model.execute(Step([], feeds))
