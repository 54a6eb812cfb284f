"""The journal: what was appended comes back, whatever happened to its files meanwhile."""

import errno
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.jobs.journal import Journal
from batchgen.jobs.outcomes import ERROR, LENGTH, STOP, Outcomes, codes_of, parse_retry
from batchgen.jobs.writer import JournalWriter
from batchgen.pipeline import storage

SCHEMA = pa.schema([("position", pa.int64()), ("outcome", pa.int8()), ("completion", pa.string())])


def rows(positions: list[int], text: str = "") -> pa.Table:
    texts = [f"{text}{position}" for position in positions]
    return pa.table([positions, [position % 3 for position in positions], texts], schema=SCHEMA)


def recovered(directory: Path, shard_rows: int = 4) -> tuple[Journal, dict[int, int]]:
    journal = Journal(directory, shard_rows)
    found = {}
    for positions, codes in journal.recover():
        found.update(zip(positions.tolist(), codes.tolist(), strict=True))
    return journal, found


def texts_of(journal: Journal, shard: int) -> dict[int, str]:
    return {row["position"]: row["completion"] for batch in journal.rows_of(shard) for row in batch.to_pylist()}


@settings(deadline=None)
@given(segments=st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=6), shard_rows=st.integers(1, 9))
def test_what_was_appended_comes_back(
    tmp_path_factory: pytest.TempPathFactory, segments: list[list[int]], shard_rows: int
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    written = Journal(directory, shard_rows)
    for number, positions in enumerate(segments):
        if positions:
            written.append(rows(positions, f"{number}:"))
    journal, found = recovered(directory, shard_rows)
    assert found == {position: position % 3 for positions in segments for position in positions}
    assert journal.pieces == written.pieces
    last = {position: number for number, positions in enumerate(segments) for position in positions}
    for shard in journal.pieces:
        texts = texts_of(journal, shard)
        assert texts == {at: f"{number}:{at}" for at, number in last.items() if at // shard_rows == shard}
    assert not journal.broken


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(1000))


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, damage_garbage])
def test_a_broken_segment_is_left_out_and_named(tmp_path: Path, damage: "type[None]") -> None:
    journal = Journal(tmp_path, 4)
    for start in (0, 4, 8):
        journal.append(rows([start, start + 1]))
    broken = sorted(tmp_path.iterdir())[1]
    damage(broken)  # type: ignore[call-arg]
    journal, found = recovered(tmp_path)
    assert sorted(found) == [0, 1, 8, 9]
    assert journal.broken == [broken]
    journal.append(rows([4]))
    assert sorted(recovered(tmp_path)[1]) == [0, 1, 4, 8, 9]


def test_strange_files_are_named_and_asides_passed_over(tmp_path: Path) -> None:
    Journal(tmp_path, 4).append(rows([1]))
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "000002-00000000.arrow.77.part").write_bytes(b"half")
    journal, found = recovered(tmp_path)
    assert (sorted(found), [path.name for path in journal.broken]) == ([1], ["notes.txt"])


def test_rows_in_final_files_are_dropped_and_later_ones_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 4)
    journal.append(rows([0, 5, 9, 13]))
    journal.append(rows([6, 9], "new"))
    journal.forget_rows_below(9)
    assert texts_of(journal, 2) == {9: "new9"}
    assert recovered(tmp_path)[1] == {9: 0, 13: 1}
    journal.forget_rows_below(14)
    assert not tmp_path.exists()


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failing_write_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    journal = Journal(tmp_path, 4)
    journal.append(rows([1]))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, call, full)
        with pytest.raises(OSError, match="No space"):
            journal.append(rows([2, 3]))
    journal, found = recovered(tmp_path)
    assert 1 in found
    assert not journal.broken
    journal.append(rows([2, 3]))
    assert sorted(recovered(tmp_path)[1]) == [1, 2, 3]


def test_the_writer_writes_at_its_end_and_when_due(tmp_path: Path) -> None:
    with JournalWriter(Journal(tmp_path, 4), checkpoint_seconds=3600) as writer:
        for position in range(20):
            writer.put(rows([position]).to_batches()[0])
        assert not list(tmp_path.glob("*.arrow"))
    assert len(list(tmp_path.glob("*.arrow"))) == 1
    with JournalWriter(Journal(tmp_path / "b", 4), checkpoint_seconds=0.001) as writer:
        writer.put(rows([1]).to_batches()[0])
        for _ in range(2000):
            if list((tmp_path / "b").glob("*.arrow")):
                break
            writer._thread.join(0.005)
        assert list((tmp_path / "b").glob("*.arrow"))


def test_many_small_batches_do_not_pile_up(tmp_path: Path) -> None:
    with JournalWriter(Journal(tmp_path, 1000), checkpoint_seconds=3600) as writer:
        batch = rows([1]).to_batches()[0]
        for _ in range(5000):
            writer.put(batch)
    assert len(list(tmp_path.glob("*.arrow"))) == 2


def test_published_rows_of_published_segments_count_no_more(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 4)
    journal.append(rows([0, 1, 5, 6, 9], "old"))
    journal.append(rows([1, 6], "new"))
    again = Journal(tmp_path, 4, published_segment=1, published_rows=6)
    found = [(positions.tolist(), codes.tolist()) for positions, codes in again.recover()]
    assert found == [([6], [0]), ([9], [0]), ([1], [1]), ([6], [0])]
    assert texts_of(again, 0) == {1: "new1"}
    assert [batch.column(2).to_pylist() for batch in again.rows_of(1)] == [["old6"], ["new6"]]
    assert not again.has_grown
    again.append(rows([2]))
    assert (again.has_grown, again.last_segment) == (True, 3)


def test_numbers_go_on_behind_published_segments(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 4, published_segment=7, published_rows=4)
    assert list(journal.recover()) == []
    journal.append(rows([2]))
    journal = Journal(tmp_path, 4, published_segment=7, published_rows=4)
    assert [positions.tolist() for positions, _ in journal.recover()] == [[2]]


def test_nothing_is_written_without_permission(tmp_path: Path) -> None:
    def refuse() -> None:
        raise RuntimeError("another run took over")

    journal = Journal(tmp_path / "journal", 4, permit=refuse)
    with pytest.raises(RuntimeError, match="took over"):
        journal.append(rows([1]))
    assert not (tmp_path / "journal").exists()


def test_a_failure_of_the_writer_reaches_the_step_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Journal, rows: pa.Table) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    writer = JournalWriter(Journal(tmp_path, 4), checkpoint_seconds=0.001)
    endless = (rows([position]).to_batches()[0] for position in range(10_000_000))
    with pytest.raises(OSError, match="No space"):
        any(writer.put(batch) for batch in endless)
    with pytest.raises(OSError, match="No space"):
        writer.close()


def test_a_failure_at_the_end_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), JournalWriter(Journal(tmp_path, 4), checkpoint_seconds=3600) as writer:
        writer.put(rows([1]).to_batches()[0])


def test_millions_of_finished_rows_take_a_byte_each(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 100_000)
    count = 1_000_000
    for start in range(0, count, 250_000):
        positions = np.arange(start, start + 250_000)
        texts = pa.array(["some answer"]).take(pa.array(np.zeros(250_000, np.int64)))
        journal.append(pa.table([pa.array(positions), pa.array(np.zeros(250_000, np.int8)), texts], schema=SCHEMA))
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    journal, outcomes = Journal(tmp_path, 100_000), Outcomes(count)
    for positions, codes in journal.recover():
        outcomes.record(positions, codes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes.counts()["stop"] == count
    assert outcomes.codes.nbytes == count
    assert peak < 8 * count
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_outcomes_and_what_is_asked_again() -> None:
    outcomes = Outcomes(6)
    outcomes.record(np.array([0, 1, 2, 9]), np.array([STOP, LENGTH, ERROR, STOP], np.int8))
    assert outcomes.counts() == {"rows": 6, "stop": 1, "length": 1, "error": 1, "skipped": 0}
    assert np.flatnonzero(outcomes.open_mask()).tolist() == [3, 4, 5]
    assert np.flatnonzero(outcomes.open_mask(parse_retry("errors, length"))).tolist() == [1, 2, 3, 4, 5]
    outcomes.record(np.array([2]), np.array([STOP], np.int8))
    assert outcomes.counts()["error"] == 0
    with pytest.raises(ValueError, match="knows errors and length, got 'all'"):
        parse_retry("all")


def test_of_several_samples_the_worst_counts() -> None:
    column = pa.array([["stop", "stop"], ["stop", "length"], ["error"]])
    assert codes_of(column).tolist() == [STOP, LENGTH, ERROR]
    assert codes_of(pa.array(["length", "stop", "error"])).tolist() == [LENGTH, STOP, ERROR]
