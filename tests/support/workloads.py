"""Real prompts with shared prefixes, for tests of reuse and for benchmarks: from data that the repository carries."""

import random
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
SHUFFLE_SEED = 20

INSTRUCTION = (
    "You write entries for an index of Python functions. Read the documentation and answer with one short sentence "
    "that says what the object is for, then with a category: io, text, math, data structures, concurrency, networking, "
    "testing or system. Use plain English and your own words, no code, and no more than thirty words.\n\n"
)
EXAMPLES = [
    (
        "json.dumps",
        "Serialize an object to a JSON formatted string. Keys that are not of a basic type are skipped on request "
        "instead of raising a TypeError; with an indent, array elements and members are pretty-printed.",
        "Turns a Python object into JSON text. Category: text",
    ),
    (
        "threading.Lock",
        "A lock is a synchronization primitive with two states. It is created unlocked, acquire() locks it or waits, "
        "release() unlocks it, and any thread may release it, not only the one that acquired it.",
        "Lets threads take turns so that only one enters a section. Category: concurrency",
    ),
    (
        "math.gcd",
        "Return the greatest common divisor of the integer arguments: the largest positive integer that divides all "
        "of them without a remainder. With no arguments, or only zeros, the result is zero.",
        "Finds the largest integer that divides all arguments. Category: math",
    ),
    (
        "shutil.copytree",
        "Recursively copy a directory tree and return the destination. Errors are collected and raised at the end; "
        "symbolic links become links or copies of what they point to, as the arguments say.",
        "Copies a folder with everything below it. Category: system",
    ),
]


def entries(rows: int | None = None) -> list[tuple[str, str]]:
    """Names of Python functions and classes with their documentation."""
    table = pq.read_table(ROOT / "examples/annotate-docs/data/api-docs.parquet").slice(0, rows)
    return list(zip(table["name"].to_pylist(), table["doc"].to_pylist(), strict=True))


def label(rows: int | None = None) -> list[str]:
    """One few-shot prefix for all rows, then a name with its documentation."""
    shots = "".join(f"Name: {name}\nDocumentation: {doc}\nAnswer: {answer}\n\n" for name, doc, answer in EXAMPLES)
    return [f"{INSTRUCTION}{shots}Name: {name}\nDocumentation: {doc}\nAnswer:" for name, doc in entries(rows)]


def mmlu(rows: int | None = None) -> list[str]:
    """57 prefixes of worked examples with five questions each, shuffled."""
    table = pq.read_table(ROOT / "tests/data/mmlu-cot.parquet").slice(0, rows)
    prompts = [a + b for a, b in zip(table["examples"].to_pylist(), table["question"].to_pylist(), strict=True)]
    random.Random(SHUFFLE_SEED).shuffle(prompts)
    return prompts


# name: (prompts, max_tokens)
WORKLOADS = {"label": (label, 32), "mmlu": (mmlu, 8)}
