"""What the scheduler knows of speculation: where drafts may stand, the drafts, and what became of them.

Puts a drafter, which guesses, and a policy, which says how much, together; knows no model.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from ..sequence import Feed, Sequence, Step
from ..statistics import Statistics


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess at the next tokens. `chances[i]`: that token i is right when those before it are, as the drafter sees it.

    `match` is how many tokens of context it was found by, `source` where.
    """

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    match: int = 0
    source: str = ""

    def cut(self, length: int) -> "Draft":
        """Its first `length` tokens."""
        if length >= len(self.tokens):
            return self
        return Draft(self.tokens[:length], self.chances[:length], self.match, self.source)

    @property
    def expected(self) -> float:
        """How many of its tokens will be right."""
        total, path = 0.0, 1.0
        for chance in self.chances:
            path *= chance
            total += path
        return total


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Guesses. It may keep what it likes in `Sequence.drafting`, and must not change anything else."""

    @property
    def most(self) -> int:
        """The longest draft it makes."""
        ...

    @property
    def writes_pages(self) -> bool:
        """It computes keys of its own in the KV slots of the sequences."""
        ...

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[Draft]:
        """One draft per sequence, of at most so many tokens; KV slots behind the sequence's tokens are there."""
        ...

    def verified(self, draft: Draft, num_right: int) -> None:
        """What became of what was fed of a draft: the first `num_right` tokens were right, no more."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """An answer is complete."""
        ...


class Policy(Protocol):
    """How much of what is drafted is worth feeding."""

    def opens(self, step: Step) -> bool:
        """Drafting is worth a try in this step."""
        ...

    def asked(self, num_sequences: int, seconds: float) -> None:
        """How long the drafter took for the drafts of so many sequences; comes before their lengths are asked for."""
        ...

    def lengths(self, drafts: dict[Sequence, Draft], step: Step) -> list[int]:
        """How many tokens of each draft to feed beside the step's own."""
        ...

    def holds(self, step: Step) -> bool:
        """The step after this one is likely to have drafts, for which tokens must be known."""
        ...

    def verified(self, sequence: Sequence, draft: Draft, num_right: int) -> None:
        """The first `num_right` tokens of a draft were right and the next, if there is one, was not."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """An answer is complete."""
        ...

    def timed(self, step: Step, seconds: float) -> None:
        """How long a step took, drafting included. Comes before its drafts are verified."""
        ...


class Speculation(Protocol):
    """What the scheduler calls, in this order for every step; `timed` is the loop's to call."""

    def places(self, step: Step) -> list[tuple[Feed, int]]: ...
    def drafts(self, wanted: list[tuple[Sequence, int]], step: Step, budget: int) -> list[tuple[int, ...]]: ...
    def holds(self, step: Step) -> bool:
        """The sequences of the step wait for their tokens, so that drafts can stand behind them."""
        ...

    def timed(self, step: Step, seconds: float) -> None: ...
    def verified(self, sequence: Sequence, draft: tuple[int, ...], num_right: int) -> None: ...
    def dropped(self, sequence: Sequence) -> None:
        """In place of `verified` for one whose row was over before the step was."""
        ...

    def ended(self, sequence: Sequence) -> None: ...


class NoSpeculation:
    """Off: every answer grows by one token a step."""

    def places(self, step: Step) -> list[tuple[Feed, int]]:
        return []

    def drafts(self, wanted: list[tuple[Sequence, int]], step: Step, budget: int) -> list[tuple[int, ...]]:
        return []

    def holds(self, step: Step) -> bool:
        return False

    def timed(self, step: Step, seconds: float) -> None:
        return None

    def verified(self, sequence: Sequence, draft: tuple[int, ...], num_right: int) -> None:
        return None

    def dropped(self, sequence: Sequence) -> None:
        return None

    def ended(self, sequence: Sequence) -> None:
        return None


NO_SPECULATION = NoSpeculation()


class Drafting:
    """Speculation with one drafter under one policy. Token ids from `vocabulary` on are cut off drafts."""

    def __init__(self, drafter: Drafter, policy: Policy, vocabulary: int, statistics: Statistics) -> None:
        self._drafter = drafter
        self._policy = policy
        self._vocabulary = vocabulary
        self._statistics = statistics
        self._fed: dict[Sequence, Draft] = {}  # of the steps under way

    def places(self, step: Step) -> list[tuple[Feed, int]]:
        """Feeds that a draft may follow, and how long it may be: the drafter's limit, and the last token is drawn.

        None for a drafter that writes to pages in a step that copies blocks: it could write to one still to be copied.
        """
        if (step.copies and self._drafter.writes_pages) or not self._policy.opens(step):
            return []
        open_feeds = [feed for feed in step.feeds if feed.samples and not feed.unknown]
        limits = [min(self._drafter.most, tokens_left(feed.sequence) - 1) for feed in open_feeds]
        return [(feed, most) for feed, most in zip(open_feeds, limits, strict=True) if most > 0]

    def drafts(self, wanted: list[tuple[Sequence, int]], step: Step, budget: int) -> list[tuple[int, ...]]:
        """The tokens to feed behind each sequence, `budget` in all."""
        if not wanted:
            return []
        began = perf_counter()
        proposed = self._drafter.propose(wanted)
        self._policy.asked(len(wanted), perf_counter() - began)
        drafts = {sequence: self._legal(draft, most) for draft, (sequence, most) in zip(proposed, wanted, strict=True)}
        chosen = []
        for draft, length in zip(drafts.values(), self._policy.lengths(drafts, step), strict=True):
            chosen.append(draft.tokens[: min(length, budget)])
            budget -= len(chosen[-1])
        self._fed |= drafts
        self._statistics.drafted_tokens += sum(map(len, chosen))
        self._statistics.drafted_steps += any(chosen)
        return chosen

    def holds(self, step: Step) -> bool:
        return self._policy.holds(step)

    def timed(self, step: Step, seconds: float) -> None:
        self._policy.timed(step, seconds)

    def verified(self, sequence: Sequence, draft: tuple[int, ...], num_right: int) -> None:
        """`draft` is what was fed of it."""
        self._statistics.accepted_tokens += num_right
        made = self._fed.pop(sequence, NO_DRAFT)
        fed = made.cut(len(draft))
        self._drafter.verified(fed, num_right)
        self._policy.verified(sequence, fed, num_right)

    def dropped(self, sequence: Sequence) -> None:
        self._fed.pop(sequence, None)

    def ended(self, sequence: Sequence) -> None:
        self._drafter.ended(sequence)
        self._policy.ended(sequence)

    def _legal(self, draft: Draft, most: int) -> Draft:
        tokens = draft.tokens[:most]
        bad = next((place for place, token in enumerate(tokens) if not 0 <= token < self._vocabulary), len(tokens))
        return (
            draft if bad == len(draft.tokens) else Draft(tokens[:bad], draft.chances[:bad], draft.match, draft.source)
        )


class Eager:
    """Feeds every draft whole: for a drafter that the user asked for by name."""

    def opens(self, step: Step) -> bool:
        return True

    def asked(self, num_sequences: int, seconds: float) -> None:
        return None

    def lengths(self, drafts: dict[Sequence, Draft], step: Step) -> list[int]:
        return [len(draft.tokens) for draft in drafts.values()]

    def holds(self, step: Step) -> bool:
        return True

    def verified(self, sequence: Sequence, draft: Draft, num_right: int) -> None:
        return None

    def ended(self, sequence: Sequence) -> None:
        return None

    def timed(self, step: Step, seconds: float) -> None:
        return None


def tokens_left(sequence: Sequence) -> int:
    """How many tokens the answer may still get."""
    return sequence.task.request.sampling.max_tokens - sequence.answer_length
