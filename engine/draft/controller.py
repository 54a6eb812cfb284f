"""Drafts only as far as they pay: acceptance and step times are learned from the run itself.

Takes the drafts that bring the end of the run nearest, rests when measured speed says otherwise, and tries again.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..sequence import Sequence, Step
from .acceptance import Acceptance
from .laggards import chances_to_be_last
from .speculation import Draft
from .times import HOPE, OUTLIER, AddedSeconds, StepTimes, assumed_per_token, rounded

WINDOW = 50  # drafted steps after which measured speed is looked at, unless they have cost too much before
REST = 100  # steps without drafts when they did not pay
LONGEST_REST = 2000
PLAIN_EVERY = 16  # every so many steps none is drafted, to know what that takes; of more and more, while drafts pay,
PLAIN_SELDOM = 64  # up to this
MOST_LOSS = 0.6  # of a step (one that others disturbed counts as half a step lost),
LOST_SHARE = 0.01  # and of a run's seconds so far,
DOUBT = 0.03  # and of the seconds of the window, as these are not known better: what drafts may cost before they rest
SURE = 0.9  # the chance of a token for which drafting must at least pay
FIRST = 2  # drafted tokens, or one for four sequences, to try where it is not known what they take
LEAST_GAIN = 0.025  # of a step's seconds, as these are not known better
CHEAP = 0.005  # of all steps' seconds: what asking the drafter may take in vain
SHUT = 25  # steps in which no draft promises to pay, after which what is known of their cost counts half


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a step of `sequences` without drafts, and those of them that each sequence adds.

    The latter are saved with every token that need not be fed later; the rest is spent once for every step.
    """

    sequences: int
    plain: float
    token: float

    @property
    def fixed(self) -> float:
        return self.plain - self.sequences * self.token

    def value(self, last: float) -> float:
        """Seconds that a right token saves the run, for a sequence with this chance to end last."""
        return self.token + self.fixed * last


class Controller:
    """The policy of `auto`. Drafts stand only in steps where every sequence feeds one token: prompts fill the machine.

    Among drafted tokens, those worth most first, as many are taken as make the least of the seconds that a run needs
    beyond those of its tokens: (fixed ones of a step + those of wrong tokens) / expected progress of the last answer.
    With equal chances to be last this is the most tokens per second.
    """

    def __init__(self) -> None:
        self._acceptance = Acceptance()
        self._plain = StepTimes()
        self._added = AddedSeconds()
        self._asked: deque[float] = deque()  # seconds that the drafter took, of steps under way
        self._asking = 0.0  # of them for a sequence, in the latest steps: half a mean of them and half the last one
        self._steps = 0
        self._plain_every = PLAIN_EVERY
        self._rest_until = 0
        self._rest = REST
        self._rested_at = 0  # sequences when the rest began
        self._sleep_until = 0
        self._slept_at = 0  # sequences when the sleep began
        self._sleep = 1
        self._shut = 0  # steps since drafts last promised to pay
        self._tried = 0  # steps of this window that tried drafts
        self._seconds = 0.0  # of all steps
        self._tried_seconds = 0.0  # what these took
        self._balance = 0.0  # seconds that drafts have saved the run in them, less those they took
        self._values: dict[Sequence, float] = {}  # of a right token, by sequence of the step under way

    def opens(self, step: Step) -> bool:
        self._steps += 1
        if not self._awake(step):
            return False
        pays = self._may_pay(step)
        self._shut = 0 if pays else self._shut + 1
        if self._shut == SHUT:  # few measurements may have told of a disturbance, and none corrects them now
            self._added.fade()
            self._asking /= 2
            self._shut = 0
        return pays

    def asked(self, num_sequences: int, seconds: float) -> None:
        self._asked.append(seconds)
        each = seconds / num_sequences
        self._asking = (self._asking + min(each, 2 * self._asking)) / 2 if self._asking else each

    def lengths(self, drafts: dict[Sequence, Draft], step: Step) -> list[int]:
        prices = self._prices(len(step.feeds))
        last = {feed.sequence: chance for feed, chance in zip(step.feeds, chances_to_be_last(step), strict=True)}
        places = [
            (path * prices.value(last[sequence]), index, path, last[sequence])
            for index, (sequence, draft) in enumerate(drafts.items())
            for path in self._acceptance.paths(sequence, draft)
        ]
        places.sort(key=lambda place: -place[0])
        count = self._best_count(((path, chance) for _, _, path, chance in places), prices)
        self._note(count, prices)
        lengths = [0] * len(drafts)
        for _, index, _, _ in places[:count]:
            lengths[index] += 1
        return lengths

    def holds(self, step: Step) -> bool:
        return self._awake(step) and self._may_pay(step)

    def verified(self, sequence: Sequence, draft: Draft, num_right: int) -> None:
        self._acceptance.observe(sequence, draft, num_right)
        self._balance += self._values.get(sequence, 0.0) * num_right

    def ended(self, sequence: Sequence) -> None:
        self._acceptance.ended(sequence)

    def timed(self, step: Step, seconds: float) -> None:
        self._values = {}
        self._seconds += seconds
        asking = self._asked.popleft() if step.tries_drafts else 0.0
        if not decodes_only(step):
            return
        if not step.tries_drafts:
            self._plain.measure(len(step.feeds), seconds)
            return
        prices = self._prices(len(step.feeds))
        self._judge(prices)
        drafted = step.num_tokens - prices.sequences
        adds = self._per_token(prices, step.num_tokens) if drafted else 0.0
        expected = prices.plain + asking + drafted * adds
        seconds = min(seconds, OUTLIER * expected)
        self._balance += prices.plain - seconds
        self._tried, self._tried_seconds = self._tried + 1, self._tried_seconds + seconds
        if drafted:
            self._added.measure(step.num_tokens, drafted, seconds - asking - prices.plain)
            chances = chances_to_be_last(step)
            self._values = {f.sequence: prices.value(last) for f, last in zip(step.feeds, chances, strict=True)}

    def _awake(self, step: Step) -> bool:
        size = len(step.feeds)
        if not decodes_only(step) or self._steps % self._plain_every == 0 or not self._plain.knows(size):
            return False
        asleep = self._steps <= self._sleep_until and 2 * size > self._slept_at
        return not asleep and (self._steps >= self._rest_until or 2 * size <= self._rested_at)

    def _may_pay(self, step: Step) -> bool:
        """Drafts as sure as any would, for the answers worth most."""
        size = len(step.feeds)
        laggards = sorted(chances_to_be_last(step), reverse=True)[: max(1, size // 4)]
        return self._best_count(((SURE, last) for last in laggards), self._prices(size), self._asking * size) > 0

    def _prices(self, size: int) -> Prices:
        plain = self._plain.seconds(size)
        free = Prices(size, plain, 0.0)
        above = self._per_token(free, size + size // 2 + 1)
        token = self._plain.per_sequence(size, min(HOPE * plain / size, above))
        return replace(free, token=min(plain / size, token))

    def _per_token(self, prices: Prices, num_tokens: int) -> float:
        """Seconds that each drafted token adds in a step of so many tokens."""
        assumed = (
            assumed_per_token(prices.sequences, num_tokens, prices.plain) if num_tokens > prices.sequences else 0.0
        )
        return self._added.per_token(num_tokens, assumed)

    def _best_count(self, places: Iterable[tuple[float, float]], prices: Prices, asking: float = 0.0) -> int:
        """How many drafted tokens to feed, of (chance to be right, chance that its sequence ends last) each."""
        best, least, size = 0, prices.fixed, 0
        right = progress = added = 0.0
        for count, (chance, last) in enumerate(places, 1):
            num_tokens = prices.sequences + count
            if rounded(num_tokens) != size:
                size = rounded(num_tokens)
                added = self._per_token(prices, num_tokens)
                if count > max(FIRST, prices.sequences // 4) + self._added.known(num_tokens):
                    break
            right += chance
            progress += chance * last
            saved = right * prices.token + progress * prices.fixed
            spent = count * added + asking
            ratio = (prices.fixed + count * added - right * prices.token) / (1 + progress)
            if ratio < least and saved - spent > LEAST_GAIN * prices.plain:
                best, least = count, ratio
        return best

    def _note(self, count: int, prices: Prices) -> None:
        """So many tokens are fed of what the drafter was asked for. In vain: it sleeps, longer each time, if dear."""
        dear = self._asking * prices.sequences / (CHEAP * prices.plain)
        if count or dear < 1:
            self._sleep = 1
        else:
            self._sleep_until, self._slept_at = self._steps + self._sleep, prices.sequences
            self._sleep = min(2 * self._sleep, math.ceil(dear))

    def _judge(self, prices: Prices) -> None:
        """Rests, longer each time, when drafts have cost too much, or did not pay in a whole window."""
        most = MOST_LOSS * prices.plain + LOST_SHARE * self._seconds + DOUBT * self._tried_seconds
        if self._tried < WINDOW and self._balance >= -most:
            return
        if self._balance < 0:
            self._rest_until, self._rested_at = self._steps + self._rest, prices.sequences
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._plain_every = PLAIN_EVERY
            self._added.fade()
        else:
            self._rest = REST
            self._plain_every = min(2 * self._plain_every, PLAIN_SELDOM)
        self._tried, self._tried_seconds, self._balance = 0, 0.0, 0.0


def decodes_only(step: Step) -> bool:
    """Every feed draws, and feeds nothing but its newest token and a draft."""
    return all(feed.samples and feed.count == 1 + len(feed.draft) for feed in step.feeds)
