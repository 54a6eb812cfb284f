"""A request inside the engine: the task that will answer it and the sequences that make its samples.

Holds state; every change to it is made by the scheduler (and by the sampler for the text a stop string is sought in).
"""

from dataclasses import dataclass, field

from .blocks import BlockNode, Match
from .request import Request, RowError, Sample, TokenLogprob
from .stopping import StopSearch


@dataclass(slots=True, eq=False)
class Task:
    """Requests with one outcome: the one that is computed and its exact duplicates."""

    request: Request
    rope_choice: int
    prompt: tuple[int, ...]
    samples: list[Sample | None]
    cached_tokens: int = 0  # of the first sample, at its first admission
    error: RowError | None = None
    followers: list[Request] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.error is not None or all(sample is not None for sample in self.samples)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample being generated. `tokens` is the prompt and the answer so far; `computed` of them have keys in pages."""

    task: Task
    sample: int
    order: int  # of first admission: rows that share a prefix are neighbours in it
    tokens: list[int]
    stops: StopSearch
    noise_base: tuple[int, int, int]  # seed, row position, sample index
    computed: int = 0
    path: list[BlockNode] = field(default_factory=list)  # prompt blocks, shared ones first
    tail: list[int] = field(default_factory=list)  # block ids behind the prompt's
    pending_match: Match | None = None  # a donor whose part is still to be copied
    logprobs: list[TokenLogprob] = field(default_factory=list)
    counts: dict[int, int] | None = None  # token -> times in the answer, for penalties; prompt tokens stand with 0
    started: bool = False
    fed_high: int = 0  # tokens ever computed: what lies below it is recomputed work

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
        return self.pending_match is not None and not self.pending_match.ready

    def block_ids(self) -> list[int]:
        return [node.block for node in self.path] + self.tail


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
