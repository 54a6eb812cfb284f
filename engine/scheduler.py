"""What the next step feeds: admission, token budget, preemption, and what a finished step changes.

Pure Python on tokens and block ids. There is one kind of step: a list of (sequence, how many of its tokens to feed).
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from .blocks import BlockNode, BlockPool, BlockTree, Match
from .forecast import Demand, LengthForecast
from .intake import Intake
from .request import Completion, RowError, Sample
from .sequence import NO_MATCH, Drawn, Feed, Sequence, Step
from .statistics import Statistics
from .stopping import finish_reason

SPARE_SHARE = 100  # one block in this many is kept free at admission


class EngineStalledError(RuntimeError):
    """No sequence can make progress: a fault of the engine, raised instead of hanging."""


class Scheduler:
    """Runs sequences in the order they come. One step at a time: `schedule`, execute, `commit`, `take_finished`.

    A prefix is never computed twice at once: who matches blocks that are still being computed waits for them. What the
    next row to come will match stays pinned, so in plan order every shared prefix is computed once.
    """

    def __init__(
        self, intake: Intake, tree: BlockTree, max_batch_tokens: int, max_sequences: int, statistics: Statistics
    ) -> None:
        self._intake = intake
        self._tree = tree
        self._pool: BlockPool = tree.pool
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = min(max_sequences, max_batch_tokens)  # every running sequence feeds at least one token
        self._statistics = statistics
        self._forecast = LengthForecast()
        self._running: list[Sequence] = []  # in plan order, as is the next
        self._preempted: list[Sequence] = []
        self._head: Sequence | None = None
        self._pinned: tuple[BlockNode, ...] = ()  # what the head will match

    # one step

    def schedule(self) -> Step | None:
        """The next step, or None when nothing is left to run. Raises EngineStalledError when nothing can run."""
        preempted = self._grow()
        if not preempted or not self._running:
            self._admit()
        if not self._running and not self._preempted:
            return None
        step = self._compose()
        if not step.feeds:
            raise EngineStalledError(self._describe())
        self._measure(step)
        return step

    def commit(self, step: Step, drawn: list[Drawn | None]) -> None:
        """Takes note of a step that ran; `drawn` holds one entry per feed, None for those that do not sample."""
        for feed, result in zip(step.feeds, drawn, strict=True):
            if feed.sequence.task.error is not None:
                continue  # another sample of its row failed in this step
            error = self._fault(result) if result is not None else None
            if error is not None:
                self._fail(feed.sequence, error)
                continue
            self._advance(feed)
            if result is not None:
                self._receive(feed.sequence, result)

    def take_finished(self) -> Iterator[Completion]:
        """The outcomes since the last call, in the order rows ended."""
        finished: deque[Completion] = self._intake.finished
        while finished:
            yield finished.popleft()

    def check_invariants(self) -> None:
        """Every block is free or held, every reference has its holder. Raises AssertionError."""
        everyone = [*self._running, *self._preempted]
        holders = [sequence.held for sequence in everyone] + [self._pinned]
        self._tree.check_invariants(holders)
        nodes = {id(node): node for held in holders for node in held}
        tails = [block for sequence in everyone for block in sequence.tail]
        self._pool.check_invariants([node.block for node in nodes.values()] + tails)

    # admission

    def _admit(self) -> None:
        """Lets sequences in while the step has tokens left for them and the KV memory room."""
        pending = sum(sequence.pending for sequence in self._running if not sequence.waits)
        demand: Demand | None = None
        while len(self._running) < self._max_sequences and pending < self._max_batch_tokens:
            sequence = self._next()
            if sequence is None:
                return
            if demand is None:
                demand = sum((self._remaining(other) for other in self._running), Demand())
            demand += self._remaining(sequence)
            match = self._match(sequence)
            if not self._fits(sequence, match, demand):
                if self._running:
                    return
                match = self._make_room(sequence)
            self._start(sequence, match)
            pending += 0 if sequence.waits else sequence.pending

    def _next(self) -> Sequence | None:
        """The sequence to admit next: preempted ones first, then the head of the intake."""
        return self._preempted[0] if self._preempted else self._new_head()

    def _new_head(self) -> Sequence | None:
        head = self._intake.head()
        if head is not self._head:
            self._head = head
            self._pin(self._match(head).nodes if head is not None else ())
        return head

    def _match(self, sequence: Sequence) -> Match:
        return self._tree.match(sequence.task.prompt, sequence.task.rope_choice)

    def _remaining(self, sequence: Sequence) -> Demand:
        """Blocks that the sequence is expected to need beyond those of its tokens so far."""
        tokens = self._forecast.remaining(sequence.answer_length, sequence.task.request.sampling)
        length, size = len(sequence.tokens), self._tree.block_size
        blocks = self._blocks(math.ceil(length + tokens.expected)) - self._blocks(length)
        return Demand(blocks, tokens.variance / size**2)

    def _fits(self, sequence: Sequence, match: Match, demand: Demand) -> bool:
        """Blocks for its tokens are free, and enough beside them for what all answers are expected to grow."""
        spare = self._pool.num_free - self._blocks(len(sequence.tokens)) + len(match.path)
        if not self._running:
            return spare >= 0
        return spare - self._pool.num_blocks // SPARE_SHARE >= demand.reserve

    def _make_room(self, sequence: Sequence) -> Match:
        """Nothing runs, so what the sequence does not match can go, the dearest last. Raises EngineStalledError."""
        match = self._match(sequence)
        for let_go in (self._unpin_preempted, self._pin_only, self._pin_whole_blocks):
            match = let_go(sequence, match)
            if self._fits(sequence, match, Demand()):
                return match
        raise EngineStalledError(self._describe())

    def _unpin_preempted(self, sequence: Sequence, match: Match) -> Match:
        for other in self._preempted:
            if other is not sequence:
                self._release_path(other)
        return self._match(sequence)

    def _pin_only(self, sequence: Sequence, match: Match) -> Match:
        self._pin(match.nodes)
        return match

    def _pin_whole_blocks(self, sequence: Sequence, match: Match) -> Match:
        self._pin(match.path)
        return replace(match, donor=None, donated=0)

    def _start(self, sequence: Sequence, match: Match) -> None:
        self._tree.hold(match.nodes)
        self._release_path(sequence)
        task = sequence.task
        sequence.path = [*match.path, *self._tree.extend(match, task.prompt, task.rope_choice)]
        sequence.tail = self._pool.take(self._blocks(len(sequence.tokens)) - len(sequence.path))
        sequence.blocks = [node.block for node in sequence.path] + sequence.tail
        sequence.computed = match.length(self._tree.block_size)
        sequence.match = match
        if self._preempted and self._preempted[0] is sequence:
            del self._preempted[0]
        else:
            self._count_arrival(sequence)
        insert_in_order(self._running, sequence)

    def _count_arrival(self, sequence: Sequence) -> None:
        self._intake.pop()
        sequence.order = self._statistics.arrived
        self._statistics.arrived += 1
        if sequence.sample == 0:
            sequence.task.cached_tokens = sequence.computed
        self._pin(tuple(sequence.path))

    def _pin(self, nodes: tuple[BlockNode, ...]) -> None:
        self._tree.hold(nodes)
        self._tree.release(self._pinned)
        self._pinned = nodes

    # composing a step

    def _grow(self) -> bool:
        """Gives every running answer the block its newest token needs; says whether that cost a preemption."""
        preempted = False
        for sequence in list(self._running):
            while self._blocks(len(sequence.tokens)) > sequence.num_blocks and sequence in self._running:
                if self._pool.num_free:
                    sequence.add_block(*self._pool.take(1))
                elif not self._shorten_pin():
                    self._preempt(self._victim())
                    preempted = True
        return preempted

    def _shorten_pin(self) -> bool:
        """Frees the last block that only the head wants, rather than stop the one sequence that runs."""
        if len(self._running) > 1 or not self._pinned or self._pinned[-1].references > 1:
            return False
        self._pin(self._pinned[:-1])
        return True

    def _compose(self) -> Step:
        """In plan order; each sequence takes what it needs but leaves one token to every later one."""
        able = [sequence for sequence in self._running if not sequence.waits]
        budget = self._max_batch_tokens
        copies: list[tuple[int, int]] = []
        feeds: list[Feed] = []
        for num_before, sequence in enumerate(able):
            count = min(sequence.pending, budget - (len(able) - num_before - 1))
            copies += self._settle(sequence)
            feeds.append(Feed(sequence, sequence.computed, count))
            budget -= count
        return Step(copies, feeds)

    def _settle(self, sequence: Sequence) -> list[tuple[int, int]]:
        """What the sequence matched is computed: copies the donated part of a block and lets the donor go."""
        match = sequence.match
        copies = []
        for donor in match.donors:
            own = sequence.path[len(match.path)]
            own.source = None
            copies.append((donor.block, own.block))
        self._let_donor_go(sequence)
        self._statistics.copied_blocks += len(copies)
        return copies

    def _victim(self) -> Sequence:
        """The sequence whose blocks cost the least to compute again, the newest among equals."""
        candidates = [sequence for sequence in self._running if not waited_for(sequence)]
        if not candidates:
            raise EngineStalledError(self._describe())
        return min(candidates, key=lambda sequence: (self._recompute_cost(sequence), -sequence.order))

    def _recompute_cost(self, sequence: Sequence) -> float:
        """Tokens to compute again per block that a preemption frees."""
        shared = sum(node.references > 1 for node in sequence.path)
        freed = sequence.num_blocks - shared
        lost = max(0, sequence.computed - shared * self._tree.block_size)
        return lost / freed if freed else float("inf")

    def _preempt(self, sequence: Sequence) -> None:
        """Takes its own blocks; its tokens stay, and so do blocks that others hold anyway."""
        self._statistics.preemptions += 1
        self._running.remove(sequence)
        self._let_donor_go(sequence)
        kept = next((i for i, node in enumerate(sequence.path) if node.references == 1 or not node.ready), None)
        self._tree.release(sequence.path[kept:] if kept is not None else [])
        self._pool.give_back(sequence.tail)
        sequence.path, sequence.tail, sequence.computed = sequence.path[:kept], [], 0
        insert_in_order(self._preempted, sequence)

    # after a step

    def _advance(self, feed: Feed) -> None:
        sequence, end, size = feed.sequence, feed.start + feed.count, self._tree.block_size
        sequence.computed = end
        first = max(feed.start - 1, 0) // size  # the block before counts too: its last tokens may have been copied
        for index in range(first, min(self._blocks(end), len(sequence.path))):
            node = sequence.path[index]
            node.filled = max(node.filled, min(end - index * size, len(node.tokens)))
        statistics = self._statistics
        statistics.computed_prompt_tokens += max(0, min(end, sequence.prompt_length) - feed.start)
        statistics.recomputed_tokens += max(0, min(end, sequence.computed_before) - feed.start)
        sequence.computed_before = max(sequence.computed_before, end)

    def _fault(self, drawn: Drawn) -> RowError | None:
        """The step's own error, or a token that no tokenizer knows."""
        legal = self._intake.limits.vocabulary
        if drawn.error is None and not 0 <= drawn.token < legal:
            message = f"token id {drawn.token} was drawn, outside 0 .. {legal - 1}"
            return RowError("engine", "generate", message, retryable=True)
        return drawn.error

    def _receive(self, sequence: Sequence, drawn: Drawn) -> None:
        task, sampling = sequence.task, sequence.task.request.sampling
        self._statistics.output_tokens += 1
        sequence.tokens.append(drawn.token)
        if drawn.logprob is not None:
            sequence.logprobs.append(drawn.logprob)
        sequence.counts.add(drawn.token)
        stopped = drawn.token not in task.ends and sequence.stops.push(drawn.token)
        reason = finish_reason(drawn.token, sequence.answer_length, stopped, sampling, task.ends)
        if reason is not None:
            self._forecast.observe(sequence.answer_length, sampling)
            answer = sequence.tokens[sequence.prompt_length :]
            logprobs = sequence.logprobs if sampling.logprobs is not None else None
            task.samples[sequence.sample] = Sample(answer, reason, logprobs)
            self._drop(sequence)
            if task.done:
                self._complete(sequence)

    def _complete(self, sequence: Sequence) -> None:
        self._statistics.cached_prompt_tokens += sequence.task.cached_tokens
        self._intake.complete(sequence.task)

    def _fail(self, sequence: Sequence, error: RowError) -> None:
        """Ends the row of `sequence` with an error; rows that waited for its prompt start over."""
        task = sequence.task
        task.error = error
        lost = [other for other in (*self._running, *self._preempted) if other.task is task]
        orphans = {id(node) for other in lost for node in other.path if not node.ready}
        for other in lost:
            self._drop(other)
        self._restart_waiting(orphans)
        self._intake.forget(task)
        self._head = None
        self._pin(())
        self._complete(sequence)

    def _restart_waiting(self, orphans: set[int]) -> None:
        """Nobody will compute these nodes: who waits for them starts over, and who waits for those in turn."""
        while orphans:
            waiting = [other for other in self._running if orphans & {id(node) for node in other.match.nodes}]
            orphans = {id(node) for other in waiting for node in other.path if not node.ready}
            for other in waiting:
                self._preempt(other)

    def _drop(self, sequence: Sequence) -> None:
        for group in (self._running, self._preempted):
            if sequence in group:
                group.remove(sequence)
        self._let_donor_go(sequence)
        self._release_path(sequence)
        self._pool.give_back(sequence.tail)
        sequence.tail = []

    def _let_donor_go(self, sequence: Sequence) -> None:
        donors, sequence.match = sequence.match.donors, NO_MATCH
        self._tree.release(donors)

    def _release_path(self, sequence: Sequence) -> None:
        self._tree.release(sequence.path)
        sequence.path = []

    # small things

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tree.block_size)

    def _measure(self, step: Step) -> None:
        statistics = self._statistics
        statistics.steps += 1
        statistics.fed_tokens += step.num_tokens
        statistics.running = len(self._running)
        statistics.kv_blocks_used = self._pool.num_blocks - self._pool.num_free
        statistics.kv_blocks_peak = max(statistics.kv_blocks_peak, statistics.kv_blocks_used)

    def _describe(self) -> str:
        waiting = sum(sequence.waits for sequence in self._running)
        return (
            f"no progress possible: {len(self._running)} sequences running ({waiting} waiting for a prefix), "
            f"{len(self._preempted)} preempted, {self._pool.num_free} of {self._pool.num_blocks} KV blocks free"
        )


def waited_for(sequence: Sequence) -> bool:
    """It is still computing prompt blocks that others hold."""
    return any(node.references > 1 and not node.ready for node in sequence.path)


def insert_in_order(group: list[Sequence], sequence: Sequence) -> None:
    """Keeps plan order; the place is nearly always the end."""
    index = len(group)
    while index and group[index - 1].order > sequence.order:
        index -= 1
    group.insert(index, sequence)
