"""What the next step feeds: admission, token budget, preemption, and what a finished step changes.

Pure Python on tokens and block ids. There is one kind of step: a list of (sequence, how many of its tokens to feed).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .blocks import BlockNode, BlockPool, BlockTree, Match
from .detokenize import Decode
from .forecast import LengthForecast, reserve
from .request import Completion, Request, RowError, Sample, TokenLogprob, Usage
from .sequence import Feed, Sequence, Step, Task
from .stopping import end_tokens, finish_reason, stop_search

MAX_FOLLOWERS = 100_000  # duplicates taken in while their answer is being computed


class EngineStalled(RuntimeError):
    """No sequence can make progress: a fault of the engine, raised instead of hanging."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step and of what runs at once, and what the model's tokens allow."""

    max_batch_tokens: int
    max_sequences: int
    vocabulary: int  # ids below it are legal
    eos_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class Statistics:
    """Counters of a run, and gauges of its last step."""

    steps: int = 0
    fed_tokens: int = 0
    computed_prompt_tokens: int = 0  # fed prompt tokens, recomputed ones included
    cached_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    copied_blocks: int = 0
    duplicates: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_peak: int = 0
    kv_blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a feed that samples yields: a token and, when asked for, its log-probability; or an error."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: RowError | None = None


@dataclass(slots=True)
class _Arrivals:
    """The head of the incoming rows: sequences of the newest task that are not admitted yet."""

    source: Iterator[Task]
    sequences: deque[Sequence] = field(default_factory=deque)
    latest: Task | None = None
    exhausted: bool = False


class Scheduler:
    """Runs tasks in the order they come. One step at a time: `schedule`, execute, `commit`, `take_finished`."""

    def __init__(
        self, tasks: Iterator[Task], pool: BlockPool, tree: BlockTree, limits: Limits, decode: Decode
    ) -> None:
        self.limits = limits
        self.statistics = Statistics(kv_blocks_total=pool.num_blocks)
        self._pool = pool
        self._tree = tree
        self._decode = decode
        self._forecast = LengthForecast()
        self._arrivals = _Arrivals(tasks)
        self._running: list[Sequence] = []  # in plan order
        self._preempted: list[Sequence] = []  # in plan order
        self._pinned: tuple[BlockNode, ...] = ()  # what the next row to come will match
        self._finished: deque[Completion] = deque()
        self._num_admitted = 0

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None when every task has its outcome. Raises EngineStalled when nothing can run."""
        if not self._grow():
            self._admit()
        if not self._running:
            if self._preempted or self._arrivals.sequences:
                raise EngineStalled(self._describe())
            return None
        step = self._compose()
        if not step.feeds:
            raise EngineStalled(self._describe())
        self._measure(step)
        return step

    def commit(self, step: Step, drawn: list[Drawn | None]) -> None:
        """Takes note of a step that ran; `drawn` holds one entry per feed, None for those that do not sample."""
        for feed, result in zip(step.feeds, drawn, strict=True):
            if feed.sequence.task.error is not None:
                continue  # another sample of its row failed in this step
            self._advance(feed)
            if result is not None:
                self._receive(feed.sequence, result)

    def fail(self, sequence: Sequence, error: RowError) -> None:
        """Ends the row of `sequence` with an error; rows that waited for its prompt start over."""
        task = sequence.task
        task.error = error
        unfilled = {id(node) for node in sequence.path if not node.ready}
        for other in [other for other in self._everyone() if other.task is task]:
            self._drop(other)
        for other in [other for other in self._running if unfilled & {id(node) for node in _wanted(other)}]:
            self._preempt(other)
        self._arrivals.sequences = deque(other for other in self._arrivals.sequences if other.task is not task)
        self._complete(task)

    def take_finished(self) -> Iterator[Completion]:
        """The outcomes since the last call, in the order rows ended."""
        while self._finished:
            yield self._finished.popleft()

    def check_invariants(self) -> None:
        """Every block is free or held, every reference has its holder. Raises AssertionError."""
        everyone = self._everyone()
        holders = [[*sequence.path, *_donor(sequence)] for sequence in everyone] + [list(self._pinned)]
        self._tree.check_invariants(holders)
        nodes = {id(node): node for held in holders for node in held}
        tails = [block for sequence in everyone for block in sequence.tail]
        self._pool.check_invariants([node.block for node in nodes.values()] + tails)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while len(self._running) < self.limits.max_sequences:
            sequence = self._next()
            if sequence is None:
                return
            match = self._tree.match(sequence.task.prompt, sequence.task.rope_choice)
            if not self._fits(sequence, match):
                if self._running:
                    return
                match = self._make_room(sequence)
            self._start(sequence, match)

    def _next(self) -> Sequence | None:
        """The sequence to admit next: preempted ones first, then the arrivals."""
        return self._preempted[0] if self._preempted else self._head()

    def _head(self) -> Sequence | None:
        arrivals = self._arrivals
        if not arrivals.sequences and not arrivals.exhausted:
            self._fetch()
        return arrivals.sequences[0] if arrivals.sequences else None

    def _fetch(self) -> None:
        """Takes in the next task that is no duplicate of the newest one, and pins what it will match."""
        arrivals = self._arrivals
        while arrivals.latest is None or len(arrivals.latest.followers) < MAX_FOLLOWERS:
            task = next(arrivals.source, None)
            if task is None:
                arrivals.exhausted = True
                self._pin(())
                return
            if task.error is not None:
                self._complete(task)
            elif arrivals.latest is not None and duplicates(arrivals.latest.request, task.request):
                self._follow(arrivals.latest, task.request)
            else:
                arrivals.latest = task
                arrivals.sequences.extend(self._sequences(task))
                self._pin(self._tree.match(task.prompt, task.rope_choice).nodes)
                return

    def _sequences(self, task: Task) -> list[Sequence]:
        sampling = task.request.sampling
        return [
            Sequence(
                task=task,
                sample=sample,
                order=-1,
                tokens=list(task.prompt),
                stops=stop_search(sampling, self._decode),
                noise_base=(sampling.seed, task.request.key, sample),
                counts=dict.fromkeys(task.prompt, 0) if penalised(task.request) else None,
            )
            for sample in range(len(task.samples))
        ]

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Blocks for its tokens are free, and enough beside them for what running answers are expected to grow."""
        needed = self._blocks(len(sequence.tokens)) - len(match.path)
        if needed > self._pool.num_free:
            return False
        if not self._running:
            return True
        expected, variance = 0.0, 0.0
        for other in (*self._running, sequence):
            mean, spread = self._forecast.remaining(other.answer_length, other.task.request.sampling)
            expected, variance = expected + mean, variance + spread
        spare = self._pool.num_free - needed - self._pool.num_blocks // 100
        return spare * self._tree.block_size >= reserve(expected, variance)

    def _make_room(self, sequence: Sequence) -> Match:
        """Nothing runs, so everything the sequence itself does not match can go. Raises EngineStalled."""
        for other in self._preempted:
            self._release_path(other)
        self._pin(())
        match = self._tree.match(sequence.task.prompt, sequence.task.rope_choice)
        if not self._fits(sequence, match):
            match = replace(match, donor=None, donated=0)
        if not self._fits(sequence, match):
            raise EngineStalled(self._describe())
        return match

    def _start(self, sequence: Sequence, match: Match) -> None:
        self._tree.hold(match.nodes)
        self._release_path(sequence)
        prompt = sequence.task.prompt
        sequence.path = [*match.path, *self._tree.extend(match, prompt, sequence.task.rope_choice)]
        sequence.tail = self._pool.take(self._blocks(len(sequence.tokens)) - len(sequence.path))
        sequence.computed = match.length(self._tree.block_size)
        sequence.pending_match = match
        if not sequence.started:
            self._admit_first(sequence)
        else:
            del self._preempted[0]
        self._insert(self._running, sequence)

    def _admit_first(self, sequence: Sequence) -> None:
        self._arrivals.sequences.popleft()
        sequence.started = True
        sequence.order = self._num_admitted
        self._num_admitted += 1
        self.statistics.cached_prompt_tokens += sequence.computed
        if sequence.sample == 0:
            sequence.task.cached_tokens = sequence.computed
        self._pin(tuple(sequence.path))

    def _pin(self, nodes: tuple[BlockNode, ...]) -> None:
        self._tree.hold(nodes)
        self._tree.release(self._pinned)
        self._pinned = nodes

    # -- composing a step ----------------------------------------------------------------------------------------

    def _grow(self) -> bool:
        """Gives every running answer the block its newest token needs; says whether that cost a preemption."""
        preempted = False
        for sequence in list(self._running):
            while sequence in self._running and self._blocks(len(sequence.tokens)) > sequence.num_blocks:
                if self._pool.num_free:
                    sequence.tail += self._pool.take(1)
                else:
                    self._preempt(self._victim())
                    preempted = True
        return preempted

    def _compose(self) -> Step:
        """In plan order; each sequence takes what it needs but leaves one token to every later one."""
        able = [sequence for sequence in self._running if not sequence.waits]
        budget = self.limits.max_batch_tokens
        copies: list[tuple[int, int]] = []
        feeds: list[Feed] = []
        for index, sequence in enumerate(able):
            count = min(sequence.pending, budget - (len(able) - index - 1))
            copies += self._settle(sequence)
            feeds.append(Feed(sequence, sequence.computed, count))
            budget -= count
        return Step(copies, feeds)

    def _settle(self, sequence: Sequence) -> list[tuple[int, int]]:
        """The match is computed by now: copies the donated part of a block, once, and lets the donor go."""
        match, sequence.pending_match = sequence.pending_match, None
        if match is None or match.donor is None:
            return []
        copy = (match.donor.block, sequence.path[len(match.path)].block)
        self._tree.release((match.donor,))
        self.statistics.copied_blocks += 1
        return [copy]

    def _victim(self) -> Sequence:
        """The sequence whose blocks cost the least to compute again, the newest among equals."""

        def cost(sequence: Sequence) -> tuple[float, int]:
            own = [node for node in sequence.path if node.references == 1]
            freed = len(own) + len(sequence.tail)
            shared = (len(sequence.path) - len(own)) * self._tree.block_size
            return (max(sequence.computed - shared, 0) / freed if freed else float("inf"), -sequence.order)

        free_to_go = [sequence for sequence in self._running if not self._waited_for(sequence)]
        if not free_to_go:
            raise EngineStalled(self._describe())
        return min(free_to_go, key=cost)

    @staticmethod
    def _waited_for(sequence: Sequence) -> bool:
        """It is still computing prompt blocks that others hold."""
        return any(node.references > 1 and not node.ready for node in sequence.path)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes its own blocks; its tokens stay, and so do blocks that others hold anyway."""
        self.statistics.preemptions += 1
        self._running.remove(sequence)
        self._let_donor_go(sequence)
        kept = next(
            (i for i, node in enumerate(sequence.path) if node.references == 1 or not node.ready), len(sequence.path)
        )
        self._tree.release(sequence.path[kept:])
        self._pool.give_back(sequence.tail)
        sequence.path, sequence.tail, sequence.computed = sequence.path[:kept], [], 0
        self._insert(self._preempted, sequence)

    # -- after a step --------------------------------------------------------------------------------------------

    def _advance(self, feed: Feed) -> None:
        sequence, end = feed.sequence, feed.start + feed.count
        sequence.computed = end
        size = self._tree.block_size
        for index in range(feed.start // size, min((end - 1) // size + 1, len(sequence.path))):
            node = sequence.path[index]
            node.filled = max(node.filled, min(end - index * size, len(node.tokens)))
        statistics = self.statistics
        statistics.computed_prompt_tokens += max(0, min(end, sequence.prompt_length) - feed.start)
        statistics.recomputed_tokens += max(0, min(end, sequence.fed_high) - feed.start)
        sequence.fed_high = max(sequence.fed_high, end)

    def _receive(self, sequence: Sequence, drawn: Drawn) -> None:
        error = drawn.error
        if error is None and not 0 <= drawn.token < self.limits.vocabulary:
            message = f"sampling returned token id {drawn.token}, outside 0 .. {self.limits.vocabulary - 1}"
            error = RowError("engine", "generate", message, retryable=True)
        if error is not None:
            self.fail(sequence, error)
            return
        self.statistics.output_tokens += 1
        sequence.tokens.append(drawn.token)
        if drawn.logprob is not None:
            sequence.logprobs.append(drawn.logprob)
        if sequence.counts is not None:
            sequence.counts[drawn.token] = sequence.counts.get(drawn.token, 0) + 1
        sampling = sequence.task.request.sampling
        ends = end_tokens(sampling, self.limits.eos_ids)
        stopped = drawn.token not in ends and sequence.stops.push(drawn.token)
        reason = finish_reason(drawn.token, sequence.answer_length, stopped, sampling, ends)
        if reason is not None:
            asked = sampling.logprobs is not None
            answer = sequence.tokens[sequence.prompt_length :]
            self._forecast.observe(len(answer), sampling)
            sequence.task.samples[sequence.sample] = Sample(answer, reason, sequence.logprobs if asked else None)
            self._drop(sequence)
            if sequence.task.done:
                self._complete(sequence.task)

    def _complete(self, task: Task) -> None:
        self._finished.append(completion(task, task.request, task.cached_tokens))
        for request in task.followers:
            self._finished.append(completion(task, request, len(task.prompt)))
        task.followers.clear()

    def _follow(self, task: Task, request: Request) -> None:
        self.statistics.duplicates += 1
        self.statistics.cached_prompt_tokens += len(task.prompt)
        if task.done:
            self._finished.append(completion(task, request, len(task.prompt)))
        else:
            task.followers.append(request)

    def _drop(self, sequence: Sequence) -> None:
        for group in (self._running, self._preempted):
            if sequence in group:
                group.remove(sequence)
        self._let_donor_go(sequence)
        self._release_path(sequence)
        self._pool.give_back(sequence.tail)
        sequence.tail = []

    def _let_donor_go(self, sequence: Sequence) -> None:
        self._tree.release(_donor(sequence))
        sequence.pending_match = None

    def _release_path(self, sequence: Sequence) -> None:
        self._tree.release(sequence.path)
        sequence.path = []

    # -- small things --------------------------------------------------------------------------------------------

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tree.block_size)

    def _everyone(self) -> list[Sequence]:
        return [*self._running, *self._preempted]

    @staticmethod
    def _insert(group: list[Sequence], sequence: Sequence) -> None:
        """Keeps plan order; nearly always at the end."""
        index = len(group)
        while index and group[index - 1].order > sequence.order:
            index -= 1
        group.insert(index, sequence)

    def _measure(self, step: Step) -> None:
        statistics = self.statistics
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


def penalised(request: Request) -> bool:
    """Its sampling looks back at the tokens so far."""
    sampling = request.sampling
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def duplicates(first: Request, second: Request) -> bool:
    """Both must get the same answer: equal prompts, greedy, parameters equal but for the seed."""
    if not first.sampling.greedy or len(first.prompt) != len(second.prompt):
        return False
    same = first.sampling is second.sampling or replace(first.sampling, seed=second.sampling.seed) == second.sampling
    return same and list(first.prompt) == list(second.prompt)


def completion(task: Task, request: Request, cached_tokens: int) -> Completion:
    """What `request` gets from the task that answered it. A greedy task computes one sample for all n."""
    if task.error is not None:
        usage = Usage(len(task.prompt), min(cached_tokens, len(task.prompt)), 0)
        return Completion(request.key, (), usage, task.error, request.tag)
    samples = tuple(sample for sample in task.samples if sample is not None)
    if len(samples) < request.sampling.n:
        samples = samples * request.sampling.n
    usage = Usage(len(task.prompt), cached_tokens, sum(len(sample.tokens) for sample in samples))
    return Completion(request.key, samples, usage, None, request.tag)


def _donor(sequence: Sequence) -> tuple[BlockNode, ...]:
    match = sequence.pending_match
    return (match.donor,) if match is not None and match.donor is not None else ()


def _wanted(sequence: Sequence) -> tuple[BlockNode, ...]:
    return sequence.pending_match.nodes if sequence.pending_match is not None else ()
