"""Peak memory against the number of rows: a run with max_tokens 1 on a tiny model, and a plan.

    .venv/bin/python tests/benchmarks/memory.py [--run 20000 200000] [--plan 100000 1000000]

Prints one line per size; the peaks of the last column must not grow beyond what a window of the plan takes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from tiny import tiny_model

CHUNK = 10_000
SCHEMA = pa.schema([("text", pa.string()), ("id", pa.int64())])


def write_rows(path: Path, num_rows: int) -> None:
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for start in range(0, num_rows, CHUNK):
            ids = list(range(start, min(start + CHUNK, num_rows)))
            writer.write_table(pa.table({"text": [f"row {i} of {i % 97}" for i in ids], "id": ids}, SCHEMA))


def measure(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a command, which must end with 0."""
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, nargs="*", default=[20_000, 200_000])
    parser.add_argument("--plan", type=int, nargs="*", default=[100_000, 1_000_000])
    args = parser.parse_args()
    program = str(Path(sys.executable).parent / "batchgen")
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        tiny_model("smollm2", work / "model")
        for command, sizes in (("run", args.run), ("plan", args.plan)):
            for num_rows in sizes:
                write_rows(work / "rows.parquet", num_rows)
                job = {
                    "model": {"path": "model", "dtype": "float32"},
                    "input": {"path": "rows.parquet"},
                    "prompt": {"text": "Say {{ text }}", "chat": False},
                    "generation": {"max_tokens": 1, "temperature": 0},
                    "output": {"path": f"out-{num_rows}"},
                    "engine": {"memory": "64MiB"},
                }
                (work / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
                quiet = ["--quiet"] if command == "run" else []
                seconds, peak = measure([program, command, str(work / "job.yaml"), *quiet])
                print(f"{command} {num_rows:>9,} rows {seconds:7.1f} s {peak / 2**20:7.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
