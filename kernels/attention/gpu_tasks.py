"""How the work items of a step become tasks of the GPU kernel: one table of 32-bit numbers, its sizes rounded up.

Knows costs and layouts, in NumPy on the host; knows no tensors. Few queries make narrow tasks, which read keys at the
speed of memory; many make wide ones, which fill the matrix units. Long runs of keys are cut so that all tasks of a
class take about the same time, and the dearest come first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import AttentionItems, Ints
from .gpu_kernels import MERGE_FIELDS, TASK_FIELDS
from .tasks import expand, split, visible_keys

NARROW_ROWS = 16
MOST_NARROW = 2 * NARROW_ROWS  # rows of an item that is still worked on in narrow tiles
TASKS_PER_PROCESSOR = (6, 3)  # wanted at least: narrow programs share a processor, a wide one has it to itself
MIN_KEYS = 256  # a run of keys is not cut shorter
OVERHEAD = 48.0  # what a task costs besides its keys, in keys

Table = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the tasks of a step depend on besides its items."""

    num_heads: int
    num_kv_heads: int
    block_size: int
    processors: int
    wide_rows: int  # of a wide tile

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.num_heads // self.num_kv_heads

    def rows(self, wide: bool) -> int:
        """Rows of a tile: a power of two that holds the heads of one query at least."""
        return max(self.wide_rows if wide else NARROW_ROWS, 1 << (self.group - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the parts of a table. Launches and addresses depend on these alone."""

    narrow: int  # tasks
    wide: int
    merges: int  # queries with several partial results
    partials: int
    entries: int  # (task, query) pairs
    blocks: int

    def holds(self, other: "Sizes") -> bool:
        """Whether a table of `other` sizes can be laid out in these; what is launched there must be launched here."""
        mine, others = self.counts(), other.counts()
        return all(own >= asked for own, asked in zip(mine, others, strict=True))

    def counts(self) -> tuple[int, ...]:
        return (self.narrow, self.wide, self.merges, self.partials, self.entries, self.blocks)

    def rounded(self) -> "Sizes":
        """On a ladder of four steps an octave, so that steps of similar shape have one size."""
        return Sizes(*(round_up(count) for count in self.counts()))

    def offsets(self) -> tuple[int, ...]:
        """Where tasks (narrow, then wide), merges, rows, positions, places and blocks begin, and the end."""
        tasks = TASK_FIELDS * self.narrow, TASK_FIELDS * self.wide
        parts = (*tasks, MERGE_FIELDS * self.merges, self.entries, self.entries, self.entries, self.blocks)
        aligned = np.cumsum([0, *(-(-part // 4) * 4 for part in parts)])
        return tuple(int(offset) for offset in aligned)


@dataclass(frozen=True, slots=True)
class Tasks:
    """The parts of a table, not padded: what `attend` and `merge` read."""

    sizes: Sizes
    parts: tuple[Ints, ...]

    def table(self, sizes: Sizes) -> Table:
        """One array laid out for these sizes, at least the tasks' own. What is left over is empty tasks."""
        offsets = sizes.offsets()
        table = np.zeros(offsets[-1], dtype=np.int32)
        for part, offset in zip(self.parts, offsets, strict=False):
            table[offset : offset + part.size] = part.ravel()
        return table


def round_up(count: int) -> int:
    """The next of 0, 1, 2, .. 8, 10, 12, 14, 16, 20, .."""
    step = 1 << max((count - 1).bit_length() - 3, 0) if count else 1
    return -(-count // step) * step


def make_tasks(items: AttentionItems, geometry: Geometry) -> Tasks:
    """The tasks of a step. Raises ValueError when a query is in no item."""
    queries = np.diff(items.query_offset)
    wide = queries * geometry.group > MOST_NARROW
    narrow_runs = _runs(items, geometry, np.flatnonzero(~wide), wide=False)
    wide_runs = _runs(items, geometry, np.flatnonzero(wide), wide=True)
    runs = np.concatenate([narrow_runs, wide_runs])
    first_query, count = runs[:, 0], runs[:, 1]
    query = items.queries[expand(first_query, count)]
    counts = np.bincount(query, minlength=len(items.positions))
    if not counts.all():
        raise ValueError(f"attention: query {int(np.argmin(counts))} of the step sees no keys")
    merged, places = _places(query, counts)
    runs[:, 0] = np.cumsum(count) - count  # entries instead of queries
    parts = (runs[: len(narrow_runs)], runs[len(narrow_runs) :], merged, query, items.positions[query], places)
    num_partials = int(merged[:, 2].sum())
    sizes = Sizes(len(narrow_runs), len(wide_runs), len(merged), num_partials, len(query), len(items.blocks))
    return Tasks(sizes, (*parts, items.blocks))


def _runs(items: AttentionItems, geometry: Geometry, chosen: Ints, wide: bool) -> Ints:
    """Tasks of the chosen items: first query in the list of all items, queries, first block, keys, first position."""
    most = geometry.rows(wide) // geometry.group
    tile, begin, count = split(np.diff(items.query_offset)[chosen], most)
    item = chosen[tile]
    first_query = items.query_offset[item] + begin
    visible = visible_keys(items, item, first_query, count)
    parts = _num_parts(visible, geometry, wide)
    blocks = -(-visible // geometry.block_size)
    row, first_block, num_blocks = split(blocks, np.maximum(-(-blocks // parts), 1))
    first_key = first_block * geometry.block_size
    keys = np.minimum(num_blocks * geometry.block_size, visible[row] - first_key)
    item = item[row]
    fields = (first_query[row], count[row], items.block_offset[item] + first_block, keys, items.start[item] + first_key)
    return np.stack(fields, axis=1)[np.argsort(-keys, kind="stable")]


def _num_parts(visible: Ints, geometry: Geometry, wide: bool) -> Ints:
    """Into how many runs the keys of every tile are cut."""
    cost = visible + OVERHEAD
    share = cost.sum() * geometry.num_kv_heads / (TASKS_PER_PROCESSOR[wide] * geometry.processors)
    wanted = np.ceil(cost / max(share, 1.0)).astype(np.int64)
    parts: Ints = np.clip(wanted, 1, np.maximum(visible // MIN_KEYS, 1))
    return parts


def _places(query: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Queries with several partial results (row, first, how many), and where every entry's result goes: -1, to `out`.

    The partial results of a query stand beside each other, so that a merge reads one run.
    """
    several = np.flatnonzero(counts > 1)
    first = np.cumsum(counts[several]) - counts[several]
    partial = np.flatnonzero(counts[query] > 1)
    places = np.full(len(query), -1, dtype=np.int64)
    places[partial[np.argsort(query[partial], kind="stable")]] = np.arange(len(partial))
    return np.stack([several, first, counts[several]], axis=1), places
