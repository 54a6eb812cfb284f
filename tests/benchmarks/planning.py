"""The out-of-core plan of many prompts: rows per second, memory, reuse against its bound, bytes on disk.

    .venv/bin/python tests/benchmarks/planning.py [--rows 10000000] [--first 5000] [--directory DIRECTORY]

Prompts have a mean of 60 tokens and share prefixes on three levels (16 of 12 tokens, 1,000 of 18, one in 16 rows of
15), shuffled. They are made beforehand, into a file; timed is the way from their tokens to rows in planned order. The
first `--first` rows are a window of their own, as in a run, which begins with them.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchgen.pipeline.runs import Part, Runs, RunSizes
from batchgen.pipeline.token_rows import ROW, RowFiles, TokenRows
from batchgen.pipeline.windows import planners

TOP, MIDDLE, LEAF = (16, 12), (1000, 18), 15
OWN = (5, 26)
VOCABULARY = 49_152


@dataclass
class Prompts:
    """Made-up prompts, chunk by chunk on disk. `bound` are the distinct prefix tokens they were made of."""

    files: list[RowFiles]
    chunks: list[tuple[int, int]]
    num_tokens: int = 0
    bound: int = 0

    def read(self) -> Iterator[TokenRows]:
        for files, (num_rows, num_tokens) in zip(self.files, self.chunks, strict=True):
            yield files.read(slice(0, num_rows), slice(0, num_tokens))


def make(num_rows: int, directory: Path, sizes: list[int]) -> Prompts:
    random = np.random.default_rng(0)
    leaves = random.integers(0, VOCABULARY, (max(1, num_rows // 16), LEAF), dtype=np.uint32)
    tops, middles = (random.integers(0, VOCABULARY, shape, dtype=np.uint32) for shape in (TOP, MIDDLE))
    used = np.zeros(len(leaves), bool)
    prompts = Prompts([], [])
    first = 0
    for size in sizes:
        leaf = random.integers(0, len(leaves), size)
        used[leaf] = True
        shared = np.concatenate([tops[leaf % 1000 % 16], middles[leaf % 1000], leaves[leaf]], axis=1)
        rows = chunk(random, shared, np.arange(first, first + size))
        prompts.files.append(RowFiles(directory, f"made-{first}"))
        prompts.files[-1].write(rows)
        prompts.chunks.append((size, len(rows.tokens)))
        prompts.num_tokens += len(rows.tokens)
        prompts.bound += len(rows.tokens) - shared.size
        first += size
    middle = np.unique(np.flatnonzero(used) % 1000)
    prompts.bound += int(used.sum()) * LEAF + len(middle) * MIDDLE[1] + len(np.unique(middle % 16)) * TOP[1]
    return prompts


def chunk(random: np.random.Generator, shared: NDArray[np.uint32], keys: NDArray[np.int64]) -> TokenRows:
    rows = np.zeros(len(keys), ROW)
    rows["key"] = keys
    rows["length"] = shared.shape[1] + random.integers(*OWN, len(keys))
    tokens = random.integers(0, VOCABULARY, int(rows["length"].sum()), dtype=np.uint32)
    made = TokenRows(tokens, rows)
    tokens[made.offsets[:-1, None] + np.arange(shared.shape[1])] = shared
    return made


def peak_memory() -> int:
    """Bytes of the largest resident set so far."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def take(parts: Iterator[Part], seen: NDArray[np.bool_]) -> int:
    """Distinct prefix tokens of a window; marks the rows that came."""
    distinct = 0
    for part in parts:
        seen[part.rows.rows["key"][part.plan.order]] = True
        distinct += part.plan.distinct_tokens
    return distinct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=5_000)
    parser.add_argument("--directory", type=Path, help="where the files go; default: the system's")
    args = parser.parse_args()
    sizes = RunSizes()
    step = min(sizes.rows, sizes.tokens // 60)
    rest = args.rows - args.first
    chunks = [args.first, *(min(step, rest - start) for start in range(0, rest, step))]
    with tempfile.TemporaryDirectory(dir=args.directory) as name, planners() as pool:
        place = Path(name)
        began = time.perf_counter()
        prompts = make(args.rows, place, chunks)
        print(f"made {args.rows:,} prompts, {prompts.num_tokens:,} tokens in {time.perf_counter() - began:.0f} s")
        began, made, processor = time.perf_counter(), peak_memory(), time.process_time()
        chunk_rows = prompts.read()
        seen = np.zeros(args.rows, bool)
        distinct = take(iter(Runs(place, "first", pool, sizes).parts(next(chunk_rows))), seen)
        begun = time.perf_counter() - began
        runs = Runs(place, "rest", pool, sizes)
        last = next(chunk_rows)
        for rows in chunk_rows:
            runs.add(last)
            last = rows
        parts = runs.parts(last)
        read = time.perf_counter() - began
        distinct += take(iter(parts), seen)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        on_disk = sum(path.stat().st_size for path in place.glob("rest-*"))
        assert seen.all()
    saved, possible = prompts.num_tokens - distinct, prompts.num_tokens - prompts.bound
    print(f"first rows planned after {begun:.2f} s, last run sorted after {read:.1f} s, all after {seconds:.1f} s")
    print(f"{args.rows / seconds:,.0f} rows/s, {args.rows / processor:,.0f} per second of processor time")
    print(f"peak memory {peak_memory() / 2**20:,.0f} MiB (making: {made >> 20:,} MiB)")
    print(f"computed / distinct prefix tokens: {distinct / prompts.bound:.4f}; reuse / bound: {saved / possible:.4f}")
    print(f"disk: {on_disk:,} bytes, {on_disk / args.rows:.0f} a row; free {shutil.disk_usage(place.parent).free:,}")


if __name__ == "__main__":
    main()
