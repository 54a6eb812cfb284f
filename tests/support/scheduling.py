"""Drives the scheduler without a model: next tokens are arithmetic on all tokens before them, so answers are known."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import strategies as st

from batchgen.engine.backlog import UNKNOWN_BACKLOG
from batchgen.engine.blocks import BlockPool, BlockTree, UnsharedBlocks
from batchgen.engine.draft.speculation import NO_SPECULATION
from batchgen.engine.intake import Intake
from batchgen.engine.loop import Outcome, StepLoop
from batchgen.engine.request import Completion, Request
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Drawn, Sequence, Step
from batchgen.engine.statistics import Statistics

VOCABULARY = 50
EOS = 7

TREE_START = list(range(10, 31))

prompts_of_a_tree = st.lists(
    st.tuples(
        st.sampled_from([(), (1, 2, 3), (1, 2, 3, 4, 5, 6, 8, 9), (1, 2, 9, 9, 9), tuple(range(10, 31))]),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    ).map(lambda parts: [*parts[0], *parts[1]]),
    min_size=1,
    max_size=24,
)


@dataclass
class Bounds:
    kv_tokens: int
    block_size: int = 4
    vocabulary: int = VOCABULARY
    context_length: int = 10_000
    eos_ids: frozenset[int] = frozenset({EOS})

    def rope_choice(self, length: int) -> int:
        return 0


def next_token(tokens: list[int], key: int = 0, sample: int = 0) -> int:
    """Depends on every token before it and, when sampled, on the row."""
    state = 17 + 1000 * key + 100_000 * sample
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCABULARY


def expected_answer(request: Request, sample: int = 0) -> list[int]:
    sampling, tokens, answer = request.sampling, list(request.prompt), []
    row = (0, 0) if sampling.greedy else (request.key, sample)
    while len(answer) < sampling.max_tokens:
        answer.append(next_token(tokens + answer, *row))
        if answer[-1] == EOS and not sampling.ignore_eos and len(answer) > sampling.min_tokens:
            break
    return answer


@dataclass
class PagedModel:
    """Stands for the device: remembers which token each slot's key was computed from, and refuses stale reads.

    A token that the scheduler does not know yet is the one drawn last.
    """

    block_size: int
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    newest: dict[Sequence, int] = field(default_factory=dict)

    def execute(self, step: Step) -> list[list[Drawn]]:
        for source, destination in step.copies:
            for offset in range(self.block_size):
                copied = self.slots.get(source * self.block_size + offset)
                self.slots[destination * self.block_size + offset] = copied or ()
        for feed in step.feeds:
            self._write(feed)
        drawn = [self._draw(feed) for feed in step.feeds]
        self.newest = {
            feed.sequence: results[-1].token for feed, results in zip(step.feeds, drawn, strict=True) if results
        }
        return drawn

    def tokens(self, sequence: Sequence) -> list[int]:
        """Known and foreseen ones."""
        return [*sequence.tokens, self.newest[sequence]] if sequence.foreseen else sequence.tokens

    def _slot(self, sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, feed) -> None:
        fed = [*self.tokens(feed.sequence)[: feed.known], *feed.draft]
        for position in range(feed.start, feed.start + feed.count):
            self.slots[self._slot(feed.sequence, position)] = tuple(fed[: position + 1])

    def _draw(self, feed) -> list[Drawn]:
        return [self.draw_at(point) for point in feed.points]

    def draw_at(self, point) -> Drawn:
        sequence, tokens = point.sequence, [*self.tokens(point.sequence), *point.drafted]
        for position in range(len(tokens)):
            assert self.slots[self._slot(sequence, position)] == tuple(tokens[: position + 1])
        request = sequence.task.request
        row = (0, 0) if request.sampling.greedy else (request.key, sequence.sample)
        return Drawn(next_token(tokens, *row))


def drive(
    requests,
    *,
    num_blocks=64,
    block_size=4,
    budget=16,
    max_sequences=8,
    sharing=True,
    model=None,
    bounds=None,
    check=True,
    drafting=None,
    backlog=UNKNOWN_BACKLOG,
    look_ahead=0,
) -> tuple[list[Completion], Statistics]:
    """Runs the requests to their end in the engine's own loop, checking invariants around every step."""
    pool = BlockPool(num_blocks)
    tree = (BlockTree if sharing else UnsharedBlocks)(pool, block_size)
    statistics = Statistics(kv_blocks_total=num_blocks)
    intake = Intake(
        iter(requests), bounds or Bounds(num_blocks * block_size), lambda tokens: "", deque(), statistics, backlog
    )
    speculation = drafting(statistics) if drafting else NO_SPECULATION
    scheduler = Scheduler(intake, tree, budget, max_sequences, statistics, speculation)
    model = model or PagedModel(block_size)

    def launch(step: Step) -> Outcome:
        assert step.num_tokens <= budget
        assert len(step.feeds) <= max_sequences
        assert all(feed.count > 0 for feed in step.feeds)
        check_invariants()
        drawn = model.execute(step)

        def outcome() -> list[list[Drawn]]:
            check_invariants()
            return drawn

        return outcome

    def check_invariants() -> None:
        if check:
            scheduler.check_invariants()

    loop = StepLoop(scheduler, launch, speculation, look_ahead)
    finished = list(loop.run(lambda: False, lambda: intake.exhausted))
    check_invariants()
    assert pool.num_free == num_blocks
    return finished, statistics


def distinct_prefix_tokens(prompts) -> int:
    """Counted in a trie of single tokens, independent of any order or block."""
    root: dict = {}
    count = 0
    for prompt in prompts:
        node = root
        for token in prompt:
            if token not in node:
                node[token] = {}
                count += 1
            node = node[token]
    return count


class CountingModel:
    """Draws token 0 and looks at nothing: for counting what is fed."""

    def execute(self, step: Step) -> list[list[Drawn]]:
        return [[Drawn(0) for _ in feed.points] for feed in step.feeds]
