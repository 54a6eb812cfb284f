"""Drafts only as far as they pay: acceptance and step times are learned from the run itself.

Takes what maximises expected tokens per second of a step, rests when measured speed says otherwise, and tries again.
"""

from dataclasses import dataclass, field

from ..sequence import Step
from .speculation import Draft
from .times import StepTimes

WINDOW = 50  # drafted steps after which measured speed is looked at, unless they have cost too much before
REST = 250  # steps without drafts when they did not pay
LONGEST_REST = 2000
PLAIN_EVERY = 24  # every so many steps none is drafted, to know what that takes
MOST_LOSS = 0.01  # of a run's seconds so far: what drafts may have cost, beside a step or two, before they rest
SURE = 0.9  # the chance of a token for which drafting must at least pay
LEAST_GAIN = 1.02  # in expected tokens per second
PRIOR = 2.0  # observations that the drafter's own chance counts as
FORGET = 256  # observations of a bucket after which the old ones count half


@dataclass(slots=True)
class Acceptance:
    """How often drafted tokens were right, by source, length of match and the drafter's own chance."""

    _seen: dict[tuple[str, int, int], list[float]] = field(default_factory=dict)  # tokens tried, right ones

    def observe(self, draft: Draft, num_right: int) -> None:
        for place in range(min(num_right + 1, len(draft.chances))):
            tried = self._seen.setdefault(bucket(draft, place), [0.0, 0.0])
            tried[0] += 1
            tried[1] += place < num_right
            if tried[0] > FORGET:
                tried[:] = [tried[0] / 2, tried[1] / 2]

    def paths(self, draft: Draft) -> list[float]:
        """For each of its tokens the chance that it and all before it are right."""
        paths, path = [], 1.0
        for place, chance in enumerate(draft.chances):
            tried, right = self._seen.get(bucket(draft, place), (0.0, 0.0))
            path *= (right + PRIOR * chance) / (tried + PRIOR)
            paths.append(path)
        return paths


def bucket(draft: Draft, place: int) -> tuple[str, int, int]:
    return draft.source, min(draft.match.bit_length(), 6), int(draft.chances[place] * 5)


class Controller:
    """The policy of `auto`. Drafts stand only in steps where every sequence feeds one token: prompts fill the machine.

    Among drafted tokens, likeliest first, those are taken that raise (sequences + expected right ones) / seconds.
    """

    def __init__(self) -> None:
        self._acceptance = Acceptance()
        self._times = StepTimes()  # of all such steps, by tokens fed
        self._plain = StepTimes()  # of those without drafts
        self._steps = 0
        self._rest_until = 0
        self._rest = REST
        self._rested_at = 0  # sequences when the rest began
        self._tried = 0  # steps of this window that tried drafts
        self._seconds = 0.0  # of all steps
        self._balance = 0.0  # seconds that its tokens would have taken without drafts, less those they took
        self._worth = 0.0  # seconds per token without drafts, in the step under way

    def opens(self, step: Step) -> bool:
        self._steps += 1
        return self._may_open(step)

    def lengths(self, drafts: list[Draft], step: Step) -> list[int]:
        paths = [self._acceptance.paths(draft) for draft in drafts]
        ranked = sorted(((q, index) for index, path in enumerate(paths) for q in path), reverse=True)
        lengths = [0] * len(drafts)
        for _, index in ranked[: self._best_count([q for q, _ in ranked], step.num_tokens)]:
            lengths[index] += 1
        return lengths

    def holds(self, step: Step) -> bool:
        return self._may_open(step)

    def verified(self, draft: Draft, num_right: int) -> None:
        self._acceptance.observe(draft, num_right)
        self._balance += self._worth * (num_right + 1)

    def timed(self, step: Step, seconds: float) -> None:
        self._worth = 0.0
        self._seconds += seconds
        if not decodes_only(step):
            return
        self._times.measure(step.num_tokens, seconds)
        if not step.tries_drafts:
            self._plain.measure(len(step.feeds), seconds)
            return
        plain = self._plain.seconds(len(step.feeds))
        if self._tried == WINDOW or self._balance < -plain - MOST_LOSS * self._seconds:
            self._judge(len(step.feeds))
        self._worth = plain / len(step.feeds)
        self._balance -= seconds
        self._tried += 1

    def _may_open(self, step: Step) -> bool:
        num_sequences = len(step.feeds)
        if not decodes_only(step) or self._steps % PLAIN_EVERY == 0 or not self._plain.seconds(num_sequences):
            return False
        if self._steps < self._rest_until and 2 * num_sequences > self._rested_at:
            return False
        return self._best_count([SURE] * max(1, num_sequences // 4), step.num_tokens) > 0

    def _best_count(self, chances: list[float], num_tokens: int) -> int:
        """How many of the drafted tokens, likeliest first, to feed beside `num_tokens` certain ones."""
        best, best_rate = 0, LEAST_GAIN * num_tokens / self._times.seconds(num_tokens)
        expected = float(num_tokens)
        for count, chance in enumerate(chances, 1):
            expected += chance
            rate = expected / self._times.seconds(num_tokens + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _judge(self, num_sequences: int) -> None:
        """The end of a window: rests, longer each time, when it did not pay."""
        if self._balance < 0:
            self._rest_until, self._rested_at = self._steps + self._rest, num_sequences
            self._rest = min(2 * self._rest, LONGEST_REST)
        else:
            self._rest = REST
        self._tried, self._balance = 0, 0.0


def decodes_only(step: Step) -> bool:
    """Every feed draws, and feeds nothing but its newest token and a draft."""
    return all(feed.samples and feed.count == 1 + len(feed.draft) for feed in step.feeds)
