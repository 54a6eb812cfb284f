"""Who holds which KV block: a pool of ids and a tree of prompt blocks shared by reference count.

Knows tokens and ids only; the numbers behind an id live in kv.py, and when to admit or evict is the scheduler's choice.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class BlockNode:
    """One block of prompt tokens below its parent. `filled` says how many of its tokens have their keys computed."""

    __slots__ = ("below", "block", "children", "filled", "parent", "references", "source", "tokens")

    def __init__(self, block: int, tokens: tuple[int, ...], parent: "BlockNode | None") -> None:
        self.block = block
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], BlockNode] = {}  # whole blocks, by content
        self.below: dict[int, BlockNode] = {}  # all blocks, by id, the latest last
        self.source: BlockNode | None = None  # the donor this block's first tokens are still to be copied from
        self.references = 0
        self.filled = 0

    @property
    def ready(self) -> bool:
        return self.filled == len(self.tokens)

    @property
    def latest(self) -> "BlockNode | None":
        """The child attached last: the best donor for a branch in mid-block."""
        return next(reversed(self.below.values()), None)


@dataclass(frozen=True, slots=True)
class Match:
    """The cached start of a prompt: whole blocks, then the first `donated` tokens of the block `donor`."""

    path: tuple[BlockNode, ...] = ()
    donor: BlockNode | None = None
    donated: int = 0

    def length(self, block_size: int) -> int:
        return len(self.path) * block_size + self.donated

    @property
    def ready(self) -> bool:
        """All of it is computed; until then whoever wants it waits."""
        if self.donor is not None and self.donor.filled < self.donated:
            return False
        return not self.path or self.path[-1].ready

    @property
    def donors(self) -> tuple[BlockNode, ...]:
        return () if self.donor is None else (self.donor,)

    @property
    def nodes(self) -> tuple[BlockNode, ...]:
        return (*self.path, *self.donors)


class BlockPool:
    """The ids 0 .. num_blocks - 1, each free or held. The last one freed is taken first, which keeps memory compact."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` ids. Raises IndexError when there are not as many; the caller asks `num_free` first."""
        if count > len(self._free):
            raise IndexError(f"{count} KV blocks wanted, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

    def check_invariants(self, live: Iterable[int]) -> None:
        """Free and live ids are disjoint, each once, and together the pool."""
        seen = Counter(self._free)
        seen.update(live)
        if len(seen) != self.num_blocks or any(count != 1 for count in seen.values()):
            wrong = {block: count for block, count in seen.items() if count != 1}
            raise AssertionError(
                f"pool of {self.num_blocks}: {len(seen)} ids accounted for, held more than once: {wrong}"
            )


class BlockTree:
    """Prompt blocks by content. Equal tokens under equal parents are one node; tokens are compared, never hashes alone.

    `key` separates prompts whose keys differ for equal tokens (a length-dependent RoPE choice).
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._roots: dict[int, BlockNode] = {}

    def match(self, prompt: Sequence[int], key: int) -> Match:
        """The longest cached start of `prompt`, its last token excluded: that one is fed to obtain logits."""
        node = self._root(key)
        limit = len(prompt) - 1
        path: list[BlockNode] = []
        while (len(path) + 1) * self.block_size <= limit:
            child = node.children.get(tuple(prompt[len(path) * self.block_size : (len(path) + 1) * self.block_size]))
            if child is None:
                break
            path.append(child)
            node = child
        donor, donated = _best_donor(node, prompt[len(path) * self.block_size : limit])
        return Match(tuple(path), donor, donated)

    def extend(self, match: Match, prompt: Sequence[int], key: int) -> list[BlockNode]:
        """New nodes for the prompt's blocks behind the matched path, in order, each held once by the caller."""
        before = parent = match.path[-1] if match.path else self._root(key)
        starts = range(len(match.path) * self.block_size, len(prompt), self.block_size)
        nodes = []
        for start, block in zip(starts, self.pool.take(len(starts)), strict=True):
            node = BlockNode(block, tuple(prompt[start : start + self.block_size]), parent)
            node.references = 1
            node.source = match.donor if parent is before else None
            self._attach(node)
            nodes.append(node)
            parent = node
        return nodes

    def hold(self, nodes: Iterable[BlockNode]) -> None:
        for node in nodes:
            node.references += 1

    def release(self, nodes: Sequence[BlockNode]) -> None:
        """Gives up one reference on each node; those that nobody holds leave the tree, deepest first."""
        for node in reversed(nodes):
            node.references -= 1
            if node.references == 0:
                self._detach(node)
                self.pool.give_back((node.block,))

    def nodes(self) -> list[BlockNode]:
        """Every node, for checks and gauges."""
        found: list[BlockNode] = []
        stack = list(self._roots.values())
        while stack:
            below = list(stack.pop().below.values())
            found += below
            stack += below
        return found

    def check_invariants(self, holders: Iterable[Sequence[BlockNode]]) -> None:
        """Every reference belongs to a holder, and every held node hangs in the tree or is a tail beside it."""
        expected = Counter(id(node) for nodes in holders for node in nodes)
        by_id = {id(node): node for nodes in holders for node in nodes}
        for identity, node in by_id.items():
            if node.references != expected[identity]:
                raise AssertionError(f"block {node.block}: {node.references} references, {expected[identity]} holders")
        for node in self.nodes():
            if id(node) not in by_id:
                raise AssertionError(f"block {node.block} is in the tree, yet nobody holds it")

    def _root(self, key: int) -> BlockNode:
        return self._roots.setdefault(key, BlockNode(-1, (), None))

    def _attach(self, node: BlockNode) -> None:
        assert node.parent is not None
        node.parent.below[node.block] = node
        if len(node.tokens) == self.block_size:  # a partial block can donate, but never stands for a whole one
            node.parent.children.setdefault(node.tokens, node)

    def _detach(self, node: BlockNode) -> None:
        assert node.parent is not None
        siblings, children = node.parent.below, node.parent.children
        del siblings[node.block]
        if children.get(node.tokens) is node:
            del children[node.tokens]
            equal = next((other for other in siblings.values() if other.tokens == node.tokens), None)
            if equal is not None:
                children[node.tokens] = equal


class UnsharedBlocks(BlockTree):
    """Prefix sharing off: nothing ever matches, so every sequence computes and holds its own blocks."""

    def match(self, prompt: Sequence[int], key: int) -> Match:
        return Match()


def _best_donor(parent: BlockNode, rest: Sequence[int]) -> tuple[BlockNode | None, int]:
    """The child sharing the most tokens with `rest`. In plan order that is the latest one; when it is still to be

    filled from a donor that shares as much, that donor can serve at once.
    """
    donor = parent.latest
    donated = common_length(donor.tokens, rest) if donor is not None else 0
    if donor is None or donated == 0:
        return None, 0
    while donor.filled < donated and donor.source is not None and donor.source.references:
        if common_length(donor.source.tokens, rest) < donated:
            break
        donor = donor.source
    return donor, donated


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    length = min(len(first), len(second))
    for index in range(length):
        if first[index] != second[index]:
            return index
    return length
