"""A request inside the engine: the task that will answer it and the sequences that make its samples.

Holds state; the scheduler makes every change to it.
"""

from dataclasses import dataclass, field

from .blocks import BlockNode, Match
from .request import Request, RowError, Sample, TokenLogprob
from .stopping import StopSearch
from .token_counts import TokenCounts

NO_MATCH = Match()


@dataclass(slots=True, eq=False)
class Task:
    """Requests with one outcome: the one that is computed and its exact duplicates."""

    request: Request
    prompt: tuple[int, ...]
    rope_choice: int  # part of the prefix key: equal tokens under another choice have other keys
    ends: frozenset[int]  # tokens that end an answer
    samples: list[Sample | None]
    cached_tokens: int = 0  # of the first sample, at its first admission
    error: RowError | None = None
    followers: list[Request] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.error is not None or all(sample is not None for sample in self.samples)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample being generated. `tokens` is prompt and answer so far; `computed` of them have keys in pages."""

    task: Task
    sample: int
    tokens: list[int]
    stops: StopSearch
    counts: TokenCounts  # for penalties
    order: int = -1  # of first admission: rows that share a prefix are neighbours in it
    computed: int = 0
    path: list[BlockNode] = field(default_factory=list)  # prompt blocks, shared ones first
    tail: list[int] = field(default_factory=list)  # block ids behind the prompt's
    blocks: list[int] = field(default_factory=list)  # ids of path and tail while it runs
    match: Match = NO_MATCH  # what its start was matched with, until its first feed
    logprobs: list[TokenLogprob] = field(default_factory=list)
    computed_before: int = 0  # tokens computed before a preemption: below it work is repeated

    @property
    def prompt_length(self) -> int:
        return len(self.task.prompt)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Tokens whose keys are still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def num_blocks(self) -> int:
        return len(self.path) + len(self.tail)

    @property
    def waits(self) -> bool:
        """Another sequence is still computing the start of this prompt."""
        return not self.match.ready

    @property
    def held(self) -> tuple[BlockNode, ...]:
        """Every tree node it has a reference on."""
        return (*self.path, *self.match.donors)

    def add_block(self, block: int) -> None:
        """Room behind its tokens so far."""
        self.tail.append(block)
        self.blocks.append(block)


@dataclass(frozen=True, slots=True)
class Feed:
    """Part of a step: tokens start .. start + count of a sequence. The last one yields logits when it is the newest."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass does: block copies first, then the feeds, neighbours in the plan next to each other."""

    copies: list[tuple[int, int]]
    feeds: list[Feed]

    @property
    def num_tokens(self) -> int:
        return sum(feed.count for feed in self.feeds)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a feed that samples yields: a token and, when asked for, its log-probability; or an error."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: RowError | None = None
