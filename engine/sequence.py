"""A request inside the engine: the task that will answer it and the sequences that make its samples.

Holds state; the scheduler makes every change to it.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

from .blocks import BlockNode, Match
from .branches import STRAIGHT, Course
from .choices import ChoiceTrie
from .grammar_state import UNCONSTRAINED, GrammarState
from .request import Request, RowError, Sample, Sampling, TokenLogprob
from .stopping import StopSearch
from .token_counts import TokenCounts

NO_MATCH = Match()
GROUP_START = 16  # prompt tokens that name a group of rows


@dataclass(slots=True, eq=False)
class Task:
    """Requests with one outcome: the one that is computed and its exact duplicates."""

    request: Request
    prompt: tuple[int, ...]
    rope_choice: int  # part of the prefix key: equal tokens under another choice have other keys
    ends: frozenset[int]  # tokens that end an answer
    samples: list[Sample | None]
    grammar: GrammarState = UNCONSTRAINED  # where its answers start
    trie: ChoiceTrie | None = None  # scored instead of generating; one sequence per part of it
    scores: list[tuple[float, ...]] = field(default_factory=list)  # by node, as they come
    choice_probs: tuple[float, ...] | None = None
    cached_tokens: int = 0  # of the first sample, at its first admission
    error: RowError | None = None
    followers: list[Request] = field(default_factory=list)

    @property
    def start(self) -> tuple[int, ...]:
        """The tokens by which prompts are told to be of one kind."""
        return self.prompt[:GROUP_START]

    @property
    def done(self) -> bool:
        return self.error is not None or all(sample is not None for sample in self.samples)

    def decide(self, trie: ChoiceTrie) -> Sample:
        """All nodes are scored: the answer is the most probable choice, the first one among equals."""
        self.choice_probs = tuple(trie.probabilities(self.scores))
        best = self.choice_probs.index(max(self.choice_probs))
        return Sample(list(trie.options[best]), "stop")


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample being generated. `tokens` is prompt and answer so far; `computed` tokens have their keys in pages, or
    will when what is under way is done. One that scores a part of a choice trie has that behind its prompt.

    `foreseen` further tokens are being drawn: the sequence goes on with them before anybody here knows them.
    """

    task: Task
    sample: int
    tokens: list[int]
    stops: StopSearch
    counts: TokenCounts  # for penalties
    grammar: GrammarState = UNCONSTRAINED  # after the answer so far
    course: Course = STRAIGHT  # how its tokens follow each other
    order: int = -1  # of first admission: rows that share a prefix are neighbours in it
    computed: int = 0
    foreseen: int = 0
    under_way: "list[Feed]" = field(default_factory=list)  # fed, in this order, with outcomes still to come
    path: list[BlockNode] = field(default_factory=list)  # prompt blocks, shared ones first
    tail: list[int] = field(default_factory=list)  # block ids behind the prompt's
    blocks: list[int] = field(default_factory=list)  # ids of path and tail while it runs
    match: Match = NO_MATCH  # what its start was matched with, until its first feed
    logprobs: list[TokenLogprob] = field(default_factory=list)
    computed_before: int = 0  # tokens computed before a preemption: below it work is repeated
    drafting: Any = None  # what the drafter keeps of it

    @property
    def prompt_length(self) -> int:
        return len(self.task.prompt)

    @property
    def answer_length(self) -> int:
        """Of the tokens that are known."""
        return len(self.tokens) - self.prompt_length

    @property
    def length(self) -> int:
        """Of the tokens that are known or foreseen."""
        return len(self.tokens) + self.foreseen

    @property
    def longest(self) -> int:
        """Tokens that prompt and answer can come to."""
        return self.prompt_length + self.task.request.sampling.max_tokens

    @property
    def pending(self) -> int:
        """Tokens whose keys are still to be computed."""
        return self.length - self.computed

    @property
    def ending(self) -> bool:
        """Whatever is being drawn, nothing is fed behind it."""
        if not self.under_way or self.pending:
            return False
        return self.task.trie is not None or self.length + 1 >= self.longest

    @property
    def nodes(self) -> tuple[tuple[int, int], ...]:
        """The nodes of a choice trie that it scores: (index of the token each stands behind, its number)."""
        trie = self.task.trie
        if trie is None:
            return ()
        return tuple((self.prompt_length + at, node) for at, node in trie.parts[self.sample].points)

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

    def take_block(self) -> int:
        """The last of its own blocks, which holds none of its tokens."""
        self.blocks.pop()
        return self.tail.pop()


@dataclass(frozen=True, slots=True)
class Point:
    """Where a token is drawn: behind a sequence's tokens and, after those, some that were only drafted. Or a node of a
    choice trie, behind which some are scored.
    """

    sequence: Sequence
    grammar: GrammarState = UNCONSTRAINED
    drafted: tuple[int, ...] = ()
    node: int | None = None  # of the choice trie that is scored

    @property
    def sampling(self) -> Sampling:
        return self.sequence.task.request.sampling

    @property
    def answer_length(self) -> int:
        return self.sequence.length - self.sequence.prompt_length + len(self.drafted)

    @property
    def tokens_left(self) -> int:
        """Tokens that the answer may still get."""
        return self.sampling.max_tokens - self.answer_length

    @property
    def counts(self) -> TokenCounts:
        return self.sequence.counts.ahead(self.drafted)


@dataclass(frozen=True, slots=True)
class Feed:
    """Part of a step: `count` tokens of a sequence from `start` on, the last of them its draft, which may be wrong.

    `samples`: the newest token is among them, so it and every drafted one yield logits. `unknown`: that token is still
    being drawn, by the step before.
    """

    sequence: Sequence
    start: int
    count: int
    draft: tuple[int, ...] = ()
    samples: bool = field(init=False)
    unknown: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.known == self.sequence.length)
        object.__setattr__(self, "unknown", self.known > len(self.sequence.tokens))

    @property
    def known(self) -> int:
        """The end of the fed tokens that are no guess."""
        return self.start + self.count - len(self.draft)

    @property
    def tokens(self) -> list[int]:
        """Those fed, with 0 in the place of the unknown one."""
        return [*self.sequence.tokens[self.start : self.known], *(0,) * self.unknown, *self.draft][-self.count :]

    @property
    def rows(self) -> Ordered[int]:
        """Which of the fed tokens it draws behind, counted from the first."""
        if self.sequence.task.trie is not None:
            return [index - self.start for index, _ in self.nodes]
        return range(self.count - self.num_points, self.count)

    @property
    def num_points(self) -> int:
        """How many tokens it draws; fewer than the draft's when a drafter feeds its draft over several steps."""
        if self.sequence.task.trie is not None:
            return len(self.nodes)
        return min(len(self.draft) + 1, self.count) if self.samples else 0

    @property
    def points(self) -> list[Point]:
        """Where it draws, in order: nowhere while the newest token is still to be fed."""
        if self.sequence.task.trie is not None:
            return [Point(self.sequence, node=node) for _, node in self.nodes]
        found = [Point(self.sequence, self.sequence.grammar)]
        for place, token in enumerate(self.draft, 1):
            found.append(Point(self.sequence, found[-1].grammar.after(token), self.draft[:place]))
        return found[len(found) - self.num_points :]

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """The nodes of a choice trie that it scores."""
        return [one for one in self.sequence.nodes if self.start <= one[0] < self.start + self.count]


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass does: block copies first, then the feeds, neighbours in the plan next to each other.

    `draining`: nothing waits to take the place of a sequence that ends. `tries_drafts`: a drafter was asked for the
    step, whatever came of that.
    """

    copies: list[tuple[int, int]]
    feeds: list[Feed]
    draining: bool = False
    tries_drafts: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(feed.count for feed in self.feeds)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one point yields: a token and, when asked for, its log-probability; or an error."""

    token: int = -1
    logprob: TokenLogprob | None = None
    scores: tuple[float, ...] = ()  # of a node of a choice trie, which draws no token
    error: RowError | None = None
