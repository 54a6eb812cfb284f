"""The sequences inside the engine and the KV blocks each of them holds.

Knows how a sequence enters, is preempted and leaves; who enters and what a step feeds is decided elsewhere.
"""

from collections.abc import Sequence as Ordered

from .blocks import BlockNode, BlockPool, BlockTree, Match
from .sequence import NO_MATCH, Sequence
from .statistics import Statistics


class EngineStalledError(RuntimeError):
    """No sequence can make progress: a fault of the engine, raised instead of hanging."""


class Residents:
    """Running and preempted sequences, both in plan order, over one tree of prompt blocks."""

    def __init__(self, tree: BlockTree, statistics: Statistics) -> None:
        self.tree = tree
        self.pool: BlockPool = tree.pool
        self.statistics = statistics
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []

    @property
    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.preempted]

    @property
    def any_under_way(self) -> bool:
        """Somebody waits for the outcome of a step."""
        return any(sequence.under_way for sequence in self.running)

    def blocks(self, num_tokens: int) -> int:
        """How many blocks that many tokens fill."""
        return -(-num_tokens // self.tree.block_size)

    def needed(self, sequence: Sequence) -> int:
        """How many blocks its tokens fill."""
        return self.blocks(sequence.course.extent(sequence.length, self.tree.block_size))

    def enter(self, sequence: Sequence, match: Match) -> None:
        """Lets a new or preempted sequence run, from what it matches on; its blocks must be free."""
        self.tree.hold(match.nodes)
        self.release_path(sequence)
        task = sequence.task
        sequence.path = [*match.path, *self.tree.extend(match, task.prompt, task.rope_choice)]
        sequence.tail = self.pool.take(self.needed(sequence) - len(sequence.path))
        sequence.blocks = [node.block for node in sequence.path] + sequence.tail
        sequence.computed = match.length(self.tree.block_size)
        sequence.match = match
        insert_in_order(self.running, sequence)

    def lengthen(self, sequence: Sequence, most: int) -> int:
        """Takes free blocks for up to `most` tokens behind its own; how many then have room."""
        while self.blocks(sequence.length + most) > sequence.num_blocks and self.pool.num_free:
            sequence.add_block(*self.pool.take(1))
        return min(most, sequence.num_blocks * self.tree.block_size - sequence.length)

    def shorten(self, sequence: Sequence) -> None:
        """Gives back the blocks behind those of its tokens."""
        while sequence.num_blocks > self.needed(sequence):
            self.pool.give_back((sequence.take_block(),))

    def settle(self, sequence: Sequence) -> list[tuple[int, int]]:
        """What the sequence matched is computed: copies the donated part of a block and lets the donor go."""
        match = sequence.match
        copies = []
        for donor in match.donors:
            own = sequence.path[len(match.path)]
            own.source = None
            copies.append((donor.block, own.block))
        self._let_donor_go(sequence)
        self.statistics.copied_blocks += len(copies)
        return copies

    def victim(self) -> Sequence:
        """The sequence whose blocks cost the least to compute again, the newest among equals.

        Raises EngineStalledError when others wait for every one.
        """
        candidates = [sequence for sequence in self.running if not waited_for(sequence)]
        if not candidates:
            raise EngineStalledError(self.describe())
        return min(candidates, key=lambda sequence: (self._recompute_cost(sequence), -sequence.order))

    def preempt(self, sequence: Sequence) -> None:
        """Takes its own blocks; its tokens stay, and so do blocks that others hold anyway."""
        self.statistics.preemptions += 1
        self.running.remove(sequence)
        self._let_donor_go(sequence)
        kept = next((i for i, node in enumerate(sequence.path) if node.references == 1 or not node.ready), None)
        self.tree.release(sequence.path[kept:] if kept is not None else [])
        self.pool.give_back(sequence.tail)
        sequence.path, sequence.tail, sequence.computed = sequence.path[:kept], [], 0
        insert_in_order(self.preempted, sequence)

    def drop(self, sequence: Sequence) -> None:
        """It leaves for good."""
        for group in (self.running, self.preempted):
            if sequence in group:
                group.remove(sequence)
        self._let_donor_go(sequence)
        self.release_path(sequence)
        self.pool.give_back(sequence.tail)
        sequence.tail = []
        sequence.under_way.clear()  # what is still to come of it is for nobody

    def drop_all(self, lost: list[Sequence]) -> None:
        """They leave unfinished; who waits for their prompts starts over, and who waits for those in turn."""
        orphans = {id(node) for sequence in lost for node in sequence.path if not node.ready}
        for sequence in lost:
            self.drop(sequence)
        while orphans:
            waiting = [other for other in self.running if orphans & {id(node) for node in other.match.nodes}]
            orphans = {id(node) for other in waiting for node in other.path if not node.ready}
            for other in waiting:
                self.preempt(other)

    def release_path(self, sequence: Sequence) -> None:
        self.tree.release(sequence.path)
        sequence.path = []

    def check_invariants(self, pinned: Ordered[BlockNode]) -> None:
        """Every block is free or held, every reference has its holder. Raises AssertionError."""
        holders = [*(sequence.held for sequence in self.everyone), pinned]
        self.tree.check_invariants(holders)
        nodes = {id(node): node for held in holders for node in held}
        tails = [block for sequence in self.everyone for block in sequence.tail]
        self.pool.check_invariants([node.block for node in nodes.values()] + tails)

    def describe(self) -> str:
        """Why nothing moves, for EngineStalledError."""
        waiting = sum(sequence.waits for sequence in self.running)
        return (
            f"no progress possible: {len(self.running)} sequences running ({waiting} waiting for a prefix), "
            f"{len(self.preempted)} preempted, {self.pool.num_free} of {self.pool.num_blocks} KV blocks free"
        )

    def _recompute_cost(self, sequence: Sequence) -> float:
        """Tokens to compute again per block that a preemption frees."""
        shared = sum(node.references > 1 for node in sequence.path)
        freed = sequence.num_blocks - shared
        lost = max(0, sequence.computed - shared * self.tree.block_size)
        return lost / freed if freed else float("inf")

    def _let_donor_go(self, sequence: Sequence) -> None:
        donors, sequence.match = sequence.match.donors, NO_MATCH
        self.tree.release(donors)


def waited_for(sequence: Sequence) -> bool:
    """It is still computing prompt blocks that others hold."""
    return any(node.references > 1 and not node.ready for node in sequence.path)


def insert_in_order(group: list[Sequence], sequence: Sequence) -> None:
    """Keeps plan order; the place is nearly always the end."""
    index = len(group)
    while index and group[index - 1].order > sequence.order:
        index -= 1
    group.insert(index, sequence)
