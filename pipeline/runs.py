"""Prompts sorted out of core: runs that fit in memory are sorted onto disk, then cut alike and merged part by part.

Knows rows and files of one directory; memory does not grow with their number, but for a few bytes per thousand tokens.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.plan import Plan, common_prefix, plan_tokens

from .token_rows import RowFiles, TokenRows, concatenate

_AT_ONCE = 2  # sorts under way, and parts made ahead


@dataclass(frozen=True, slots=True)
class RunSizes:
    """How much is sorted at once and makes a part, and how fine runs are indexed, in tokens and rows.

    A block has `block` tokens and `block_rows` rows of mean length at least: the first prompts of all blocks are kept.
    """

    tokens: int = 1 << 22
    rows: int = 1 << 16
    block: int = 1 << 14
    block_rows: int = 16


@dataclass(frozen=True)
class Part:
    """Rows that follow all those of the part before in planned order, with their plan.

    `plan.common[0]` is the common prefix with the last row of the part before.
    """

    rows: TokenRows
    plan: Plan

    @property
    def last_prompt(self) -> NDArray[np.uint32]:
        return self.rows.prompt(int(self.plan.order[-1]))

    def joined(self, before: NDArray[np.uint32]) -> "Part":
        """The same behind a part that ends with the prompt `before`."""
        common = self.plan.common.copy()
        common[0] = common_prefix(before, self.rows.prompt(int(self.plan.order[0])))
        return replace(self, plan=Plan(self.plan.order, common, self.plan.distinct_tokens - int(common[0])))


def plan_rows(rows: TokenRows) -> Part:
    return Part(rows, plan_tokens(rows.tokens, rows.offsets))


@dataclass(frozen=True)
class Run:
    """Sorted rows on disk. Block b begins with row `starts[b, 0]` and token `starts[b, 1]`; `heads` are those rows."""

    files: RowFiles
    starts: NDArray[np.int64]
    heads: TokenRows
    end: NDArray[np.int64]  # rows and tokens of the run

    def piece(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> TokenRows:
        return self.files.read(slice(int(begin[0]), int(end[0])), slice(int(begin[1]), int(end[1])))

    def search(self, block: int, key: bytes, behind_equal: bool) -> NDArray[np.int64]:
        """Row and token in a block before which prompts less than `key` stand, or those equal to it as well."""
        begin = self.starts[block]
        rows = self.piece(begin, self.starts[block + 1] if block + 1 < len(self.starts) else self.end)
        text, ends = sort_key(rows.tokens), (4 * rows.offsets).tolist()
        place = bisect_right if behind_equal else bisect_left
        found = place(range(len(rows)), key, key=lambda index: text[ends[index] : ends[index + 1]])
        return np.array([int(begin[0]) + found, int(begin[1] + rows.offsets[found])])


def write_run(rows: TokenRows, files: RowFiles, sizes: RunSizes) -> Run:
    """Sorts rows and writes them. Raises StoreError when the disk is full."""
    ordered = rows.take(plan_rows(rows).plan.order)
    files.write(ordered)
    num_rows, num_tokens = len(ordered), len(ordered.tokens)
    block = max(sizes.block, sizes.block_rows * num_tokens // num_rows)
    at = np.unique(np.searchsorted(ordered.offsets[:-1], np.arange(0, max(num_tokens, 1), block)))
    at = at[at < num_rows]
    starts = np.stack([at, ordered.offsets[at]], axis=1)
    return Run(files, starts, ordered.take(at), np.array([num_rows, num_tokens]))


def sort_key(tokens: NDArray[np.uint32]) -> bytes:
    """Bytes that compare as the tokens do."""
    return tokens.astype(">u4").tobytes()


class Partition:
    """Cuts runs along the same prompts, so that everything in a part comes before everything in the next.

    The cuts are heads of blocks, evenly chosen among all of them in order. Equal prompts are told apart by their run
    and their place in it, as if these stood behind the tokens; so any number of them can be cut. A part of P blocks
    holds at most P + (number of runs) blocks.
    """

    def __init__(self, runs: Sequence[Run], part_tokens: int) -> None:
        self._runs = runs
        self._heads = concatenate([run.heads for run in runs])
        counts = [len(run.heads) for run in runs]
        self._order = plan_rows(self._heads).plan.order
        ranks = np.empty(len(self._order), np.int64)
        ranks[self._order] = np.arange(len(self._order))
        self._firsts = np.concatenate([[0], np.cumsum(counts)])
        self._ranks = [ranks[first : first + count] for first, count in zip(self._firsts, counts, strict=False)]
        wanted = -(-sum(int(run.end[1]) for run in runs) // part_tokens)
        self._step = -(-len(self._order) // max(1, wanted))
        self._cuts: dict[int, list[NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return -(-len(self._order) // self._step)

    def part(self, number: int) -> Part:
        """Reads a part and plans it. May be called from several threads; each part once, about in order."""
        begins, ends = self._cut(number), self._cut(number + 1)
        self._cuts.pop(number - 1, None)
        pieces = [run.piece(*ends_of_piece) for run, *ends_of_piece in zip(self._runs, begins, ends, strict=True)]
        return plan_rows(concatenate(pieces))

    def _cut(self, number: int) -> list[NDArray[np.int64]]:
        """Row and token of every run at which part `number` begins."""
        known = self._cuts.get(number)
        if known is None:
            known = self._cuts[number] = self._find_cut(number * self._step)
        return known

    def _find_cut(self, rank: int) -> list[NDArray[np.int64]]:
        if rank == 0:
            return [run.starts[0] for run in self._runs]
        if rank >= len(self._order):
            return [run.end for run in self._runs]
        head = int(self._order[rank])
        owner = int(np.searchsorted(self._firsts, head, side="right")) - 1
        key = sort_key(self._heads.prompt(head))
        return [self._cut_run(number, rank, owner, key) for number in range(len(self._runs))]

    def _cut_run(self, number: int, rank: int, owner: int, key: bytes) -> NDArray[np.int64]:
        run = self._runs[number]
        block = int(np.searchsorted(self._ranks[number], rank))  # the first that begins at the cut or behind it
        if number == owner or block == 0:
            start: NDArray[np.int64] = run.starts[block]
            return start
        return run.search(block - 1, key, behind_equal=number < owner)


class Runs:
    """Takes rows in input order, a chunk of at most `sizes` at a time, and gives them back in planned order.

    One chunk stays in memory. `pool` sorts, reads and plans, so that the caller can go on meanwhile.
    """

    def __init__(self, directory: Path, name: str, pool: Executor, sizes: RunSizes) -> None:
        self._place = (directory, name)
        self._pool = pool
        self._sizes = sizes
        self._sorting: deque[Future[Run]] = deque()
        self._runs: list[Run] = []
        self.num_bytes = 0  # on disk

    def add(self, rows: TokenRows) -> None:
        """Sorts a chunk onto disk. Raises StoreError when the disk is full."""
        if len(self._sorting) >= _AT_ONCE:
            self._runs.append(self._sorting.popleft().result())
        directory, name = self._place
        files = RowFiles(directory, f"{name}-{len(self._runs) + len(self._sorting)}")
        self.num_bytes += rows.num_bytes
        self._sorting.append(self._pool.submit(write_run, rows, files, self._sizes))

    def parts(self, rest: TokenRows) -> "Parts":
        """Everything added and the last chunk, in planned order; nothing can be added any more."""
        if not self._runs and not self._sorting:
            return Parts(self._pool, [partial(plan_rows, rest)] if len(rest) else [])
        if len(rest):
            self.add(rest)
        self._runs += [sorting.result() for sorting in self._sorting]
        partition = Partition(self._runs, self._sizes.tokens)
        return Parts(self._pool, [partial(partition.part, number) for number in range(len(partition))])

    def remove(self) -> None:
        for run in self._runs:
            run.files.remove()


class Parts:
    """Parts one after another, the next ones made in the pool while one is used."""

    def __init__(self, pool: Executor, makers: Sequence[Callable[[], Part]]) -> None:
        self._pool = pool
        self._makers = iter(makers)
        self._ahead: deque[Future[Part]] = deque()
        for _ in range(_AT_ONCE):
            self._start()

    def _start(self) -> None:
        maker = next(self._makers, None)
        if maker is not None:
            self._ahead.append(self._pool.submit(maker))

    def __iter__(self) -> Iterator[Part]:
        before = np.zeros(0, np.uint32)
        while self._ahead:
            part = self._ahead.popleft().result()
            self._start()
            if len(part.rows):
                yield part.joined(before)
                before = part.last_prompt
