"""Drives the scheduler without a model: next tokens are arithmetic on all tokens before them, so answers are known."""

from collections import deque
from dataclasses import dataclass, field

from batchgen.engine.blocks import BlockPool, BlockTree, UnsharedBlocks
from batchgen.engine.intake import Intake
from batchgen.engine.request import Completion, Request
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Drawn, Step
from batchgen.engine.statistics import Statistics

VOCABULARY = 50
EOS = 7


@dataclass
class Bounds:
    kv_tokens: int
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
    """Stands for the device: remembers which token each slot's key was computed from, and refuses stale reads."""

    block_size: int
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def execute(self, step: Step) -> list[Drawn | None]:
        for source, destination in step.copies:
            for offset in range(self.block_size):
                copied = self.slots.get(source * self.block_size + offset)
                self.slots[destination * self.block_size + offset] = copied or ()
        for feed in step.feeds:
            self._write(feed)
        return [self._draw(feed) if feed.samples else None for feed in step.feeds]

    def _slot(self, sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, feed) -> None:
        for position in range(feed.start, feed.start + feed.count):
            self.slots[self._slot(feed.sequence, position)] = tuple(feed.sequence.tokens[: position + 1])

    def _draw(self, feed) -> Drawn:
        sequence = feed.sequence
        for position in range(len(sequence.tokens)):
            assert self.slots[self._slot(sequence, position)] == tuple(sequence.tokens[: position + 1])
        request = sequence.task.request
        row = (0, 0) if request.sampling.greedy else (request.key, sequence.sample)
        return Drawn(next_token(sequence.tokens, *row))


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
) -> tuple[list[Completion], Statistics]:
    """Runs the requests to their end, checking invariants around every step."""
    pool = BlockPool(num_blocks)
    tree = (BlockTree if sharing else UnsharedBlocks)(pool, block_size)
    statistics = Statistics(kv_blocks_total=num_blocks)
    intake = Intake(iter(requests), bounds or Bounds(num_blocks * block_size), lambda tokens: "", deque(), statistics)
    scheduler = Scheduler(intake, tree, budget, max_sequences, statistics)
    model = model or PagedModel(block_size)
    finished: list[Completion] = []
    while True:
        step = scheduler.schedule()
        if check:
            scheduler.check_invariants()
        finished += scheduler.take_finished()
        if step is None:
            if intake.exhausted:
                break
            continue
        assert step.num_tokens <= budget
        assert all(feed.count > 0 for feed in step.feeds)
        scheduler.commit(step, model.execute(step))
        if check:
            scheduler.check_invariants()
        finished += scheduler.take_finished()
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

    def execute(self, step: Step) -> list[Drawn | None]:
        return [Drawn(0) if feed.samples else None for feed in step.feeds]
