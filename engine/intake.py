"""Rows on their way into the engine: tasks from requests, refusals, exact duplicates, one sequence per sample.

Pulls one task at a time, when the scheduler asks for it; allocates nothing.
"""

import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace
from typing import Protocol

from .backlog import UNKNOWN_BACKLOG, Backlog
from .branches import Forked
from .choices import ChoiceTrie, Part
from .detokenize import Decode
from .grammar import Grammar, GrammarError
from .grammar_state import UNCONSTRAINED, GrammarState
from .request import Completion, Request, RowError, Sampling, Usage
from .sequence import Sequence, Task
from .statistics import Statistics
from .stopping import end_tokens, stop_search
from .token_counts import NoCounts, PromptAndAnswerCounts

Judge = Callable[[Request, "RowLimits"], RowError | None]  # why a request cannot be taken, if so

MAX_WAITING = 4096  # outcomes not yet handed out, and duplicates of a row that is being computed


class RowLimits(Protocol):
    """What one row may ask of the model and of the KV memory."""

    @property
    def vocabulary(self) -> int: ...  # legal token ids are below it
    @property
    def context_length(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...  # tokens that all KV blocks hold
    @property
    def block_size(self) -> int: ...  # tokens that one holds
    @property
    def eos_ids(self) -> frozenset[int]: ...
    def rope_choice(self, length: int) -> int: ...
    def grammar_start(self, grammar: Grammar) -> GrammarState:
        """The state of an answer without tokens. Raises GrammarError."""
        ...

    def choice_trie(self, grammar: Grammar) -> ChoiceTrie: ...


@dataclass(slots=True)
class Intake:
    """The next sequences to admit. Outcomes that need no computation go straight to `finished`."""

    requests: Iterator[Request]
    limits: RowLimits
    decode: Decode
    finished: deque[Completion]
    statistics: Statistics
    backlog: Backlog = UNKNOWN_BACKLOG
    judge: Judge = field(default_factory=lambda: refusal)
    exhausted: bool = False  # every request has been taken
    _arrived: deque[Sequence] | None = None
    _latest: Task | None = None

    def head(self) -> Sequence | None:
        """The sequence to come next; None when there is none, or none yet."""
        if not self._arrived:
            self._arrived = deque(self._fetch())
        return self._arrived[0] if self._arrived else None

    def pop(self) -> None:
        """The head has been admitted."""
        assert self._arrived
        self._arrived.popleft()

    def forget(self, task: Task) -> None:
        """Drops what is left of a task that has failed."""
        self._arrived = deque(sequence for sequence in self._arrived or () if sequence.task is not task)

    def complete(self, task: Task) -> None:
        """Hands out the outcome of a task to all its requests."""
        self.finished.append(completion(task, task.request, task.cached_tokens))
        self.finished.extend(completion(task, request, len(task.prompt)) for request in task.followers)
        task.followers.clear()

    def _fetch(self) -> Iterable[Sequence]:
        latest = self._latest
        while len(self.finished) < MAX_WAITING and (latest is None or len(latest.followers) < MAX_WAITING):
            request = self._take()
            if request is None:
                self.exhausted = True
                return ()
            error = self.judge(request, self.limits)
            if error is not None:
                self.finished.append(Completion(request.key, (), Usage(prompt_tokens(request)), error, request.tag))
            elif latest is not None and duplicates(latest.request, request):
                self._follow(latest, request)
            else:
                self._latest = new_task(request, self.limits)
                return self._sequences(self._latest)
        return ()

    def _take(self) -> Request | None:
        """The next request, None behind the last; the time it takes to come is the engine's wait for the host."""
        began = time.perf_counter()
        request = next(self.requests, None)
        self.statistics.host_wait_seconds += time.perf_counter() - began
        self.backlog.took()
        return request

    def _sequences(self, task: Task) -> list[Sequence]:
        sequences = new_sequences(task, self.decode)
        known = sum(sequence.answer_length for sequence in sequences if task.trie is None)
        self.statistics.output_tokens += known
        self.statistics.forced_tokens += known
        return sequences

    def _follow(self, task: Task, request: Request) -> None:
        self.statistics.duplicates += 1
        self.statistics.cached_prompt_tokens += len(task.prompt)
        task.followers.append(request)
        if task.done:
            self.finished.append(completion(task, task.followers.pop(), len(task.prompt)))


def prompt_tokens(request: Request) -> int:
    """How long a prompt is; 0 for something that is none."""
    return len(request.prompt) if isinstance(request.prompt, Sized) else 0


def carried_error(request: Request, limits: RowLimits) -> RowError | None:
    """The error that a request brings along: all there is to know where `refusal` has been asked."""
    return request.error


def refusal(request: Request, limits: RowLimits) -> RowError | None:
    """Why the engine cannot take this request, if so."""
    if request.error is not None:
        return request.error
    try:
        prompt, sampling = list(map(operator.index, request.prompt)), request.sampling
    except TypeError:
        return RowError("bad_params", "request", f"the prompt must be a list of token ids, got {request.prompt!r:.100}")
    total = len(prompt) + sampling.max_tokens
    sizes = f"{len(prompt)} prompt tokens + max_tokens {sampling.max_tokens}"
    if not prompt:
        return RowError("empty_prompt", "prompt", "the prompt has no tokens")
    for token in (min(prompt), max(prompt), *sampling.stop_token_ids):
        if not 0 <= token < limits.vocabulary:
            return RowError("bad_params", "request", f"token id {token} is outside 0 .. {limits.vocabulary - 1}")
    if total > limits.context_length:
        return RowError("context_length", "request", f"{sizes} exceed the context of {limits.context_length}")
    if total > limits.kv_tokens:
        message = f"{sizes} exceed the KV memory of {limits.kv_tokens} tokens; raise engine.memory"
        return RowError("engine", "generate", message, retryable=True)
    try:
        start_of(sampling, limits)
    except GrammarError as error:
        return RowError("bad_grammar", "request", f"{sampling.grammar and sampling.grammar.kind}: {error}")
    trie = trie_of(sampling, limits)
    return None if trie is None else trie_refusal(trie, request, limits)


def trie_refusal(trie: ChoiceTrie, request: Request, limits: RowLimits) -> RowError | None:
    """Why the choices of a request cannot be scored, if so."""
    longest, most, length = max(map(len, trie.options)), request.sampling.max_tokens, len(request.prompt)
    if longest > most:
        message = f"choice_probs: a choice has {longest} tokens, more than max_tokens ({most})"
        return RowError("bad_params", "request", message)
    courses = [Forked(part.branches, length) for part in trie.parts]
    widest = max(one.extent(length + len(one.branches.tokens), limits.block_size) for one in courses)
    if widest > limits.kv_tokens:
        message = (
            f"choice_probs: prompt and choices take {widest} tokens of KV memory, more than its {limits.kv_tokens}"
        )
        return RowError("engine", "generate", f"{message}; raise engine.memory", retryable=True)
    return None


def trie_of(sampling: Sampling, limits: RowLimits) -> ChoiceTrie | None:
    """What is scored instead of generating."""
    return limits.choice_trie(sampling.grammar) if sampling.choice_probs and sampling.grammar is not None else None


def start_of(sampling: Sampling, limits: RowLimits) -> GrammarState:
    """Where the grammar of an answer starts. Raises GrammarError."""
    return UNCONSTRAINED if sampling.grammar is None else limits.grammar_start(sampling.grammar)


def new_task(request: Request, limits: RowLimits) -> Task:
    sampling = request.sampling
    trie = trie_of(sampling, limits)
    return Task(
        request=request,
        prompt=tuple(request.prompt),
        rope_choice=limits.rope_choice(len(request.prompt) + sampling.max_tokens),
        ends=end_tokens(sampling, limits.eos_ids),
        samples=[None] * (1 if sampling.greedy else sampling.n),
        grammar=start_of(sampling, limits),
        trie=trie,
        scores=[()] * (len(trie.nodes) if trie is not None else 0),
    )


def new_sequences(task: Task, decode: Decode) -> list[Sequence]:
    """One per sample; they share the task's prompt and what the grammar puts at the start of every answer. Or one per
    part of what is scored.
    """
    if task.trie is not None:
        parts = enumerate(task.trie.parts)
        return [_scored_sequence(task, at, decode, part) for at, part in parts]
    start, opening = task.grammar, opening_tokens(task)
    for token in opening:
        start = start.after(token)
    return [_new_sequence(task, sample, decode, opening, start) for sample in range(len(task.samples))]


def _new_sequence(task: Task, sample: int, decode: Decode, opening: list[int], grammar: GrammarState) -> Sequence:
    sampling = task.request.sampling
    counts = PromptAndAnswerCounts(task.prompt, sampling.max_tokens) if penalised(sampling) else NoCounts()
    for token in opening:
        counts.add(token)
    return Sequence(task, sample, [*task.prompt, *opening], stop_search(sampling, decode), counts, grammar)


def _scored_sequence(task: Task, number: int, decode: Decode, part: Part) -> Sequence:
    sequence = _new_sequence(task, number, decode, list(part.branches.tokens), UNCONSTRAINED)
    sequence.course = Forked(part.branches, sequence.prompt_length)
    return sequence


def opening_tokens(task: Task) -> list[int]:
    """The forced start of the answer, fed with the prompt; the last token is left to draw, so that a step ends it."""
    sampling = task.request.sampling
    if sampling.logprobs is not None or sampling.stop:
        return []
    opening = list(task.grammar.forced())[: sampling.max_tokens - 1]
    state = task.grammar
    for place, token in enumerate(opening):
        state = state.after(token)
        if state.finished or token in task.ends:
            return opening[:place]
    return opening


def penalised(sampling: Sampling) -> bool:
    """It looks back at the tokens so far."""
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
        return Completion(request.key, (), Usage(len(task.prompt), cached_tokens, 0), task.error, request.tag)
    samples = tuple(sample for sample in task.samples if sample is not None)
    if len(samples) < request.sampling.n:
        samples = samples * request.sampling.n
    usage = Usage(len(task.prompt), cached_tokens, sum(len(sample.tokens) for sample in samples))
    return Completion(request.key, samples, usage, None, request.tag, task.choice_probs)
