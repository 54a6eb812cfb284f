"""The plan out of core is the plan in memory: same order, same common prefixes, however small its pieces are."""

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.plan import plan
from batchgen.pipeline import token_rows
from batchgen.pipeline.runs import Part, Partition, Runs, RunSizes, write_run
from batchgen.pipeline.token_rows import ROW, RowFiles, StoreError, TokenRows, concatenate

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=40)
SIZES = st.builds(
    RunSizes,
    tokens=st.integers(1, 30),
    rows=st.integers(1, 12),
    block=st.integers(1, 12),
    block_rows=st.just(1),
)


def rows_of(prompts: list[list[int]], first: int = 0) -> TokenRows:
    rows = np.zeros(len(prompts), ROW)
    rows["key"] = np.arange(first, first + len(prompts))
    rows["length"] = [len(prompt) for prompt in prompts]
    return TokenRows(np.array([token for prompt in prompts for token in prompt], np.uint32), rows)


def parts_of(prompts: list[list[int]], sizes: RunSizes, directory: Path) -> Iterator[Part]:
    with ThreadPoolExecutor(2) as pool:
        runs = Runs(directory, "w", pool, sizes)
        starts = range(0, max(len(prompts), 1), sizes.rows)
        chunks = [rows_of(prompts[start : start + sizes.rows], start) for start in starts]
        for rows in chunks[:-1]:
            runs.add(rows)
        yield from runs.parts(chunks[-1])
        runs.remove()


@settings(deadline=None)
@given(PROMPTS, SIZES)
def test_parts_together_are_the_plan_in_memory(prompts: list[list[int]], sizes: RunSizes) -> None:
    with TemporaryDirectory() as directory:
        parts = list(parts_of(prompts, sizes, Path(directory)))
        assert list(Path(directory).iterdir()) == []
    whole = plan(prompts)
    keys = [key for part in parts for key in part.rows.rows["key"][part.plan.order].tolist()]
    assert keys == whole.order.tolist()
    assert [length for part in parts for length in part.plan.common.tolist()] == whole.common.tolist()
    assert sum(part.plan.distinct_tokens for part in parts) == whole.distinct_tokens
    for part in parts:
        for index, key in enumerate(part.rows.rows["key"].tolist()):
            assert part.rows.prompt(index).tolist() == prompts[key]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=60), st.integers(1, 8))
def test_a_part_is_bounded_whatever_the_prompts(prompts: list[list[int]], block: int) -> None:
    """Most prompts are equal here; a cut can go between equal ones. One block is at most 16 rows and what it holds."""
    with TemporaryDirectory() as directory:
        chunks = [prompts[start : start + 20] for start in range(0, len(prompts), 20)]
        runs = [
            write_run(rows_of(chunk), RowFiles(Path(directory), str(number)), RunSizes(block=block, block_rows=2))
            for number, chunk in enumerate(chunks)
        ]
        largest = max(int(size) for run in runs for size in np.diff([*run.starts[:, 1].tolist(), int(run.end[1])]))
        partition = Partition(runs, part_tokens=8)
        step = partition._step
        sizes = [len(partition.part(number).rows.tokens) for number in range(len(partition))]
    assert sum(sizes) == sum(map(len, prompts))
    assert max(sizes) <= (step + len(runs)) * largest


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=12), st.data())
def test_taking_rows_keeps_each_with_its_tokens(prompts: list[list[int]], data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(prompts)))), np.int64)
    taken = rows_of(prompts).take(order)
    assert [taken.prompt(index).tolist() for index in range(len(prompts))] == [prompts[index] for index in order]
    assert taken.rows["key"].tolist() == order.tolist()


def test_taking_rows_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rows, "_GATHERED_AT_ONCE", 3)
    prompts = [[1, 2, 3, 4, 5], [], [6], [7, 8], [9, 9, 9, 9]]
    taken = rows_of(prompts).take(np.array([4, 2, 1, 0, 3]))
    assert [taken.prompt(index).tolist() for index in range(5)] == [prompts[index] for index in (4, 2, 1, 0, 3)]


def test_nothing_at_all(tmp_path: Path) -> None:
    assert list(parts_of([], RunSizes(), tmp_path)) == []
    assert len(concatenate([rows_of([]), rows_of([])])) == 0


def test_a_full_disk_names_the_directory_and_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with ThreadPoolExecutor(1) as pool:
        runs = Runs(tmp_path, "w", pool, RunSizes())
        runs.add(rows_of([[1, 2, 3], [4]]))
        with pytest.raises(StoreError, match="the disk is full: the token store needs 64 bytes more") as caught:
            list(runs.parts(rows_of([[5]])))
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)
