"""What the next step feeds, and what a finished step changes.

Pure Python on tokens and block ids. There is one kind of step: a list of (sequence, how many of its tokens to feed).
"""

from collections import deque
from collections.abc import Iterator

from .admission import Admission
from .blocks import BlockTree
from .intake import Intake
from .request import Completion, RowError, Sample
from .residents import EngineStalledError, Residents
from .sequence import Drawn, Feed, Sequence, Step
from .statistics import Statistics
from .stopping import finish_reason


class Scheduler:
    """Runs sequences in the order they come. One step at a time: `schedule`, execute, `commit`, `take_finished`.

    A prefix is never computed twice at once: who matches blocks that are still being computed waits for them. What the
    next row to come will match stays pinned, so in plan order every shared prefix is computed once.
    """

    def __init__(
        self, intake: Intake, tree: BlockTree, max_batch_tokens: int, max_sequences: int, statistics: Statistics
    ) -> None:
        self._intake = intake
        self._max_batch_tokens = max_batch_tokens
        self._statistics = statistics
        self._residents = Residents(tree, statistics)
        self._admission = Admission(intake, self._residents, max_batch_tokens, max_sequences)

    # one step

    def schedule(self) -> Step | None:
        """The next step, or None when nothing is left to run. Raises EngineStalledError when nothing can run."""
        residents = self._residents
        preempted = self._grow()
        if not preempted or not residents.running:
            self._admission.admit()
        if not residents.running and not residents.preempted:
            return None
        step = self._compose()
        if not step.feeds:
            raise EngineStalledError(residents.describe())
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
        self._residents.check_invariants(self._admission.pinned)

    # composing a step

    def _grow(self) -> bool:
        """Gives every running answer the block its newest token needs; says whether that cost a preemption."""
        residents, preempted = self._residents, False
        for sequence in list(residents.running):
            while residents.blocks(len(sequence.tokens)) > sequence.num_blocks and sequence in residents.running:
                if residents.pool.num_free:
                    sequence.add_block(*residents.pool.take(1))
                elif not self._admission.shorten_pin():
                    residents.preempt(residents.victim())
                    preempted = True
        return preempted

    def _compose(self) -> Step:
        """In plan order; each sequence takes what it needs but leaves one token to every later one."""
        able = [sequence for sequence in self._residents.running if not sequence.waits]
        budget = self._max_batch_tokens
        copies: list[tuple[int, int]] = []
        feeds: list[Feed] = []
        for num_before, sequence in enumerate(able):
            count = min(sequence.pending, budget - (len(able) - num_before - 1))
            copies += self._residents.settle(sequence)
            feeds.append(Feed(sequence, sequence.computed, count))
            budget -= count
        return Step(copies, feeds)

    def _measure(self, step: Step) -> None:
        statistics, pool = self._statistics, self._residents.pool
        statistics.steps += 1
        statistics.fed_tokens += step.num_tokens
        statistics.running = len(self._residents.running)
        statistics.kv_blocks_used = pool.num_blocks - pool.num_free
        statistics.kv_blocks_peak = max(statistics.kv_blocks_peak, statistics.kv_blocks_used)

    # after a step

    def _advance(self, feed: Feed) -> None:
        sequence, end, size = feed.sequence, feed.start + feed.count, self._residents.tree.block_size
        sequence.computed = end
        first = max(feed.start - 1, 0) // size  # the block before counts too: its last tokens may have been copied
        for index in range(first, min(self._residents.blocks(end), len(sequence.path))):
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
            self._admission.observe(sequence.answer_length, sampling)
            answer = sequence.tokens[sequence.prompt_length :]
            logprobs = sequence.logprobs if sampling.logprobs is not None else None
            task.samples[sequence.sample] = Sample(answer, reason, logprobs)
            self._residents.drop(sequence)
            if task.done:
                self._complete(sequence)

    def _complete(self, sequence: Sequence) -> None:
        self._statistics.cached_prompt_tokens += sequence.task.cached_tokens
        self._intake.complete(sequence.task)

    def _fail(self, sequence: Sequence, error: RowError) -> None:
        """Ends the row of `sequence` with an error; rows that waited for its prompt start over."""
        task = sequence.task
        task.error = error
        self._residents.drop_all([other for other in self._residents.everyone if other.task is task])
        self._admission.forget(task)
        self._complete(sequence)
