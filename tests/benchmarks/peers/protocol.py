"""How a benchmark talks to a program that runs rows: arguments in, one JSON line out. Imports nothing but Python's own.

A row is `{"tokens": [...], "max_tokens": N, "n": N, "temperature": X}`; end tokens are ignored, so that every program
makes the same number of tokens. Times are seconds since the epoch, so that the caller can set its own beside them.
"""

import json
import sys
from pathlib import Path
from typing import Any


def read_call(arguments: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the options of a call `SCRIPT ROWS.jsonl OPTIONS`."""
    _, rows, options = arguments
    return [json.loads(line) for line in Path(rows).read_text(encoding="utf-8").splitlines()], json.loads(options)


def write_result(**fields: Any) -> None:
    """`start`, `first`, `end` (of the first row, of all), `answers` (for each row a list of samples), and what else."""
    sys.stdout.write("\n" + json.dumps(fields) + "\n")
    sys.stdout.flush()


def warm_prompts() -> list[list[int]]:
    """Token ids of many lengths that share nothing with a workload."""
    return [[(7 * i + 13 * j) % 2000 + 100 for j in range(8 + 24 * i)] for i in range(24)]
