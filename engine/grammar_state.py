"""Where an answer stands in its grammar: what may follow, what must, and whether it is complete.

States never change: a token leads to another state, so drafts can be followed and dropped. Knows token ids, no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

MAX_KEPT = 2000  # states of a grammar that several answers have passed through

Mask = NDArray[np.int32]  # [W]: bit v % 32 of word v // 32 is 1 where token v may follow


class GrammarState(Protocol):
    """The place of one answer in its grammar."""

    @property
    def finished(self) -> bool:
        """The answer is complete and nothing can follow."""
        ...

    def after(self, token: int) -> "GrammarState": ...
    def forced(self) -> Sequence[int]:
        """Tokens that must follow whatever is drawn: the tokenizer's own spelling of text without alternatives."""
        ...


class Unconstrained:
    """The state of an answer without a grammar."""

    finished = False

    def after(self, token: int) -> "Unconstrained":
        return self

    def forced(self) -> Sequence[int]:
        return ()


UNCONSTRAINED = Unconstrained()


def plain(message: str) -> str:
    """The first line of what llguidance says, without its marks."""
    return message.partition("\n")[0].replace("<non-verbose/>", "").strip()


@dataclass(slots=True)
class Budget:
    """What the states of one grammar share: how many more are kept, whether forced runs are followed at once."""

    forcing: bool
    left: int = MAX_KEPT
    reserve: int = 0  # tokens before max_tokens from which on an answer is watched over, to be closed in time


@dataclass(slots=True, eq=False)
class MatcherState:
    """A state held by a matcher of llguidance. The second answer to take the same way finds it kept, mask included."""

    matcher: LLMatcher
    budget: Budget
    kept: bool = True
    mask: Mask | None = None  # filled when a step needs it
    _ways: dict[int, "MatcherState | None"] = field(default_factory=dict)  # None: taken once so far

    @property
    def error(self) -> str | None:
        """Why llguidance gave up, if it did: a token against the grammar, or a grammar beyond its limits."""
        return plain(self.matcher.get_error()) or None

    @property
    def accepting(self) -> bool:
        """What there is so far is a complete answer."""
        return bool(self.matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self.matcher.is_stopped() and self.matcher.is_accepting())

    def after(self, token: int) -> "MatcherState":
        known = self._ways.get(token)
        if known is not None:
            return known
        matcher = self.matcher.deep_copy()
        matcher.consume_token(token)
        again, room = token in self._ways, self.budget.left > 0
        state = MatcherState(matcher, self.budget, kept=self.kept and again and room)
        if self.kept and room:
            self._ways[token] = state if again else None
            self.budget.left -= again
        return state

    def forced(self) -> Sequence[int]:
        return () if not self.budget.forcing or self.finished else self.matcher.compute_ff_tokens()
