"""Who may start running: as many sequences as the step has tokens for and the KV memory is expected to hold.

Knows the row to come next and keeps pinned what it will match; what running sequences do is not known here.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from .blocks import BlockNode, Match
from .forecast import Demand, LengthForecast, Running
from .intake import Intake
from .residents import EngineStalledError, Residents
from .sequence import Sequence, Task

SPARE_SHARE = 100  # one block in this many is kept free at admission
WAITING_STEPS = 16  # of tokens that wait for a prefix fill the steps to come; more would only hold memory


class Admission:
    """Lets sequences in, preempted ones first, then in the order they come."""

    def __init__(self, intake: Intake, residents: Residents, max_batch_tokens: int, max_sequences: int) -> None:
        self._intake = intake
        self._residents = residents
        self.limit(max_batch_tokens, max_sequences)
        self._forecast = LengthForecast(self._running_shares)
        self._head: Sequence | None = None
        self.pinned: tuple[BlockNode, ...] = ()  # what the head will match

    def limit(self, max_batch_tokens: int, max_sequences: int) -> None:
        """What may be fed and run at once from now on."""
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = min(max_sequences, max_batch_tokens)  # every answer that goes on feeds at least one token

    def admit(self) -> None:
        """Lets sequences in while the step has tokens left for them and the KV memory room."""
        running = self._residents.running
        pending = sum(self._share_of_step(sequence) for sequence in running)
        demand: Demand | None = None
        most = self._intake.backlog.most(running, self._max_sequences)
        most += sum(sequence.ending for sequence in running)
        while len(running) < most and pending < self._max_batch_tokens:
            sequence = self._next()
            if sequence is None:
                return
            if demand is None:
                demand = sum((self._remaining(other) for other in running), Demand())
            demand += self._remaining(sequence)
            match = self._match(sequence)
            if not self._fits(sequence, match, demand):
                if running:
                    return
                match = self._make_room(sequence)
            self._start(sequence, match)
            pending += self._share_of_step(sequence)

    def shorten_pin(self) -> bool:
        """Frees the last block that only the head wants, rather than stop the one sequence that runs."""
        if len(self._residents.running) > 1 or not self.pinned or self.pinned[-1].references > 1:
            return False
        self._pin(self.pinned[:-1])
        return True

    def observe(self, sequence: Sequence) -> None:
        """Takes note of how long a finished answer is, once it has left."""
        task = sequence.task
        self._forecast.observe(sequence.answer_length, task.request.sampling, task.start)

    def forget(self, task: Task) -> None:
        """Drops what is still to come of a task that has failed."""
        self._intake.forget(task)
        self._head = None
        self._pin(())

    def _share_of_step(self, sequence: Sequence) -> float:
        """Tokens that a sequence takes of the step; one that waits takes none, yet enough of them count as a step."""
        return sequence.pending / WAITING_STEPS if sequence.waits else sequence.pending

    def _running_shares(self) -> Iterator[Running]:
        for sequence in self._residents.everyone:
            if sequence.task.trie is None:
                yield sequence.answer_length / sequence.task.request.sampling.max_tokens, sequence.task.start

    def _next(self) -> Sequence | None:
        """The sequence to admit next: preempted ones first, then the head of the intake."""
        preempted = self._residents.preempted
        return preempted[0] if preempted else self._new_head()

    def _new_head(self) -> Sequence | None:
        head = self._intake.head()
        if head is not self._head:
            self._head = head
            self._pin(self._match(head).nodes if head is not None else ())
        return head

    def _match(self, sequence: Sequence) -> Match:
        return self._residents.tree.match(sequence.task.prompt, sequence.task.rope_choice)

    def _remaining(self, sequence: Sequence) -> Demand:
        """Blocks that the sequence is expected to need beyond those of its tokens so far."""
        task = sequence.task
        if task.trie is not None:
            return Demand()
        tokens = self._forecast.remaining(sequence.answer_length, task.request.sampling, task.start)
        length, size = sequence.length, self._residents.tree.block_size
        blocks = self._residents.blocks(math.ceil(length + tokens.expected)) - self._residents.blocks(length)
        return Demand(blocks, tokens.variance / size**2)

    def _fits(self, sequence: Sequence, match: Match, demand: Demand) -> bool:
        """Blocks for its tokens are free, and enough beside them for what all answers are expected to grow."""
        pool = self._residents.pool
        spare = pool.num_free - self._residents.needed(sequence) + len(match.path)
        if not self._residents.running:
            return spare >= 0
        return spare - pool.num_blocks // SPARE_SHARE >= demand.reserve

    def _make_room(self, sequence: Sequence) -> Match:
        """Nothing runs, so what the sequence does not match can go, the dearest last. Raises EngineStalledError."""
        match = self._match(sequence)
        for let_go in (self._unpin_preempted, self._pin_only, self._pin_whole_blocks):
            match = let_go(sequence, match)
            if self._fits(sequence, match, Demand()):
                return match
        raise EngineStalledError(self._residents.describe())

    def _unpin_preempted(self, sequence: Sequence, match: Match) -> Match:
        for other in self._residents.preempted:
            if other is not sequence:
                self._residents.release_path(other)
        return self._match(sequence)

    def _pin_only(self, sequence: Sequence, match: Match) -> Match:
        self._pin(match.nodes)
        self._residents.release_path(sequence)  # of its own blocks it keeps those it matches
        return match

    def _pin_whole_blocks(self, sequence: Sequence, match: Match) -> Match:
        self._pin(match.path)
        return replace(match, donor=None, donated=0)

    def _start(self, sequence: Sequence, match: Match) -> None:
        preempted = self._residents.preempted
        is_new = not preempted or preempted[0] is not sequence
        if is_new:
            sequence.order = self._residents.statistics.arrived
        else:
            del preempted[0]
        self._residents.enter(sequence, match)
        if is_new:
            self._count_arrival(sequence)

    def _count_arrival(self, sequence: Sequence) -> None:
        self._intake.pop()
        self._residents.statistics.arrived += 1
        if sequence.sample == 0:
            sequence.task.cached_tokens = sequence.computed
        self._pin(tuple(sequence.path))

    def _pin(self, nodes: tuple[BlockNode, ...]) -> None:
        tree = self._residents.tree
        tree.hold(nodes)
        tree.release(self.pinned)
        self.pinned = nodes
