"""What the next step feeds; what a finished step changes stands in outcomes.py.

Pure Python on tokens and block ids. There is one kind of step: a list of (sequence, how many of its tokens to feed).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from .admission import Admission
from .blocks import BlockTree
from .draft.speculation import NO_SPECULATION, Speculation
from .grammar_state import UNCONSTRAINED
from .intake import Intake, penalised
from .outcomes import Outcomes
from .request import Completion
from .residents import EngineStalledError, Residents
from .sequence import Drawn, Feed, Sequence, Step
from .statistics import Statistics

SITTING_OUT = 8  # of so many sequences that could be fed while a step is under way, one may have to wait for it


class Scheduler:
    """Runs sequences in the order they come. For each step: `schedule`, `launched` when it is under way, `commit` with
    its outcome, in the order of the steps; `take_finished` at any time. The device takes steps one after the other.

    A prefix is never computed twice at once: who matches blocks that are still being computed waits for them. What the
    next row to come will match stays pinned, so in plan order every shared prefix is computed once.

    A step may be planned while one is under way. A sequence whose next token changes nothing but an id goes on with it
    unseen; an answer that turns out to have ended has been fed once too often, and what that drew is for nobody. Others
    sit the step out; when they are too many the outcome is waited for, and so it is before anything is preempted.
    """

    def __init__(
        self,
        intake: Intake,
        tree: BlockTree,
        max_batch_tokens: int,
        max_sequences: int,
        statistics: Statistics,
        speculation: Speculation = NO_SPECULATION,
    ) -> None:
        self._intake = intake
        self._max_batch_tokens = max_batch_tokens
        self._statistics = statistics
        self._speculation = speculation
        self._residents = Residents(tree, statistics)
        self._admission = Admission(intake, self._residents, max_batch_tokens, max_sequences)
        self._outcomes = Outcomes(intake, self._residents, self._admission, statistics, speculation)
        self._asked = self._taken = max_batch_tokens, max_sequences  # other threads set the first, the loop the second

    def adopt(self, max_batch_tokens: int, max_sequences: int) -> None:
        """Other limits, as soon as no more sequences run than a step of the new size feeds. From any thread."""
        self._asked = max_batch_tokens, max_sequences

    # one step

    def schedule(self) -> Step | None:
        """The next step, or None when nothing is left to run, or an outcome has to be known first.

        Raises EngineStalledError when nothing can run.
        """
        residents = self._residents
        self._take_limits()
        lacking = self._grow()
        waits = residents.any_under_way
        if waits and lacking:
            return None
        if not self._make_room(lacking) or not residents.running:
            self._admission.admit()
        if not residents.running and not residents.preempted:
            return None
        if waits and not self._worth_going_ahead():
            return None
        step = self._compose()
        if not step.feeds:
            raise EngineStalledError(residents.describe())
        step = self._draft(step)
        self._measure(step)
        return step

    def launched(self, step: Step) -> None:
        """The step is under way: for what its sequences feed next it is as good as done."""
        holds = self._speculation.holds(step)
        for feed in step.feeds:
            sequence = feed.sequence
            sequence.under_way.append(feed)
            sequence.computed = feed.known
            if feed.samples and not feed.draft and not holds and goes_on_unseen(sequence):
                sequence.foreseen += 1

    def commit(self, step: Step, drawn: list[list[Drawn]]) -> None:
        """Takes note of a step that ran; `drawn` holds, for each feed, what each of its points drew."""
        for feed, results in zip(step.feeds, drawn, strict=True):
            waiting = feed.sequence.under_way
            if waiting and waiting[0] is feed:  # else the answer has ended, or another sample of its row failed
                del waiting[0]
                self._outcomes.take(feed, results)
            else:
                self._speculation.dropped(feed.sequence)

    def take_finished(self) -> Iterator[Completion]:
        """The outcomes since the last call, in the order rows ended."""
        finished: deque[Completion] = self._intake.finished
        while finished:
            yield finished.popleft()

    def check_invariants(self) -> None:
        """Every block is free or held, every reference has its holder. Raises AssertionError."""
        self._residents.check_invariants(self._admission.pinned)

    # composing a step

    def _take_limits(self) -> None:
        """Admission goes by them at once; a step goes on to feed one token at least of each answer that goes on."""
        asked = self._asked  # read once: others may be asked for at any time, and be equal to those taken last
        if asked is not self._taken:
            self._admission.limit(*asked)
            if len(self._residents.running) <= asked[0]:
                self._max_batch_tokens, self._taken = asked[0], asked

    def _grow(self) -> list[Sequence]:
        """Gives running answers the block their newest token needs, as long as there are free ones; who lacks one."""
        residents = self._residents
        for sequence in residents.running:
            while self._lacks_block(sequence) and residents.pool.num_free:
                sequence.add_block(*residents.pool.take(1))
        return [sequence for sequence in residents.running if self._lacks_block(sequence)]

    def _make_room(self, lacking: list[Sequence]) -> bool:
        """Finds blocks for those that lack one; says whether that cost a preemption."""
        residents, preempted = self._residents, False
        for sequence in lacking:
            while sequence in residents.running and self._lacks_block(sequence):
                if residents.pool.num_free:
                    sequence.add_block(*residents.pool.take(1))
                elif not self._admission.shorten_pin():
                    residents.preempt(residents.victim())
                    preempted = True
        return preempted

    def _lacks_block(self, sequence: Sequence) -> bool:
        return self._residents.needed(sequence) > sequence.num_blocks

    def _worth_going_ahead(self) -> bool:
        """Few sequences would have to sit the step out: those that need an outcome first, or a prefix."""
        able = sum(may_feed(sequence) for sequence in self._residents.running)
        held = sum(not may_feed(sequence) and not sequence.ending for sequence in self._residents.running)
        return able > 0 and held * SITTING_OUT <= able

    def _compose(self) -> Step:
        """In plan order; each sequence takes what it needs but leaves one token to every later answer.

        Prompts that nothing is left for sit the step out: in pieces of a token they would cost more.
        """
        able = [sequence for sequence in self._residents.running if may_feed(sequence)]
        reserved = sum(map(answers, able))
        budget = self._max_batch_tokens
        copies: list[tuple[int, int]] = []
        feeds: list[Feed] = []
        for sequence in able:
            reserved -= answers(sequence)
            count = min(sequence.pending, budget - reserved)
            if count > 0:
                copies += self._residents.settle(sequence)
                feeds.append(Feed(sequence, sequence.computed, count))
                budget -= count
        return Step(copies, feeds, draining=self._intake.exhausted and not self._residents.preempted)

    def _draft(self, step: Step) -> Step:
        """Adds guesses behind newest tokens, as far as the token budget and the free blocks go."""
        budget = self._max_batch_tokens - step.num_tokens
        places = self._speculation.places(step) if budget else []
        places = [(feed, most) for feed, most in places if feed.sequence.task.trie is None]
        wanted = [(feed.sequence, self._residents.lengthen(feed.sequence, most)) for feed, most in places]
        drafts = self._speculation.drafts(wanted, step, budget)
        guessed = {id(feed): draft for (feed, _), draft in zip(places, drafts, strict=True)}
        feeds = [
            Feed(feed.sequence, feed.start, feed.count + len(draft), draft)
            for feed in step.feeds
            for draft in (guessed.get(id(feed), ()),)
        ]
        return replace(step, feeds=feeds, tries_drafts=bool(places))

    def _measure(self, step: Step) -> None:
        statistics, pool = self._statistics, self._residents.pool
        statistics.steps += 1
        statistics.fed_tokens += step.num_tokens
        statistics.running = len(self._residents.running)
        statistics.kv_blocks_used = pool.num_blocks - pool.num_free
        statistics.kv_blocks_peak = max(statistics.kv_blocks_peak, statistics.kv_blocks_used)


def may_feed(sequence: Sequence) -> bool:
    """It has tokens to feed, and what they stand behind is computed or under way."""
    return not sequence.waits and sequence.pending > 0


def answers(sequence: Sequence) -> bool:
    """Its prompt is computed. (Known tokens of an answer may stand behind one that is not: forced, or preempted.)"""
    return sequence.computed >= sequence.prompt_length


def goes_on_unseen(sequence: Sequence) -> bool:
    """All that is fed behind its next token depends on that token's id alone, and something is fed behind it."""
    plain = sequence.grammar is UNCONSTRAINED and sequence.task.trie is None
    return plain and not penalised(sequence.task.request.sampling) and sequence.length + 1 < sequence.longest
