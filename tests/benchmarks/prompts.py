"""The workloads of a benchmark, from data that the repository carries: which prompts, how many tokens, how drawn.

Each has a structure of its own: one prefix for all rows, none, a long instruction with short answers, many prefixes,
decoding alone, several samples of a prompt. Knows no engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
from workloads import EXAMPLES, INSTRUCTION, ROOT, label, mmlu

Entries = list[tuple[str, str]]
GUIDE_ENTRIES, GUIDE_WORDS = 9, 50  # of the long instruction, about 900 tokens


def documents() -> Entries:
    table = pq.read_table(ROOT / "examples/annotate-docs/data/api-docs.parquet")
    return list(zip(table["name"].to_pylist(), table["doc"].to_pylist(), strict=True))


def without_prefix(rows: int | None) -> list[str]:
    return [f"Name: {name}\nDocumentation: {doc}\nAnswer:" for name, doc in documents()[:rows]]


def long_instruction(rows: int | None) -> list[str]:
    entries = documents()
    shown = [(name, " ".join(doc.split()[:GUIDE_WORDS])) for name, doc in entries[-GUIDE_ENTRIES:]]
    guide = "".join(f"Entry: {name}\n{doc}\n\n" for name, doc in [*((name, doc) for name, doc, _ in EXAMPLES), *shown])
    return [f"{INSTRUCTION}{guide}Entry: {name}\n{doc}\nCategory:" for name, doc in entries[:rows]]


def tutorials(rows: int | None) -> list[str]:
    return [f"Write a short tutorial with one example about {name}.\n\n" for name, _ in documents()[:rows]]


def functions(rows: int | None) -> list[str]:
    return [
        f'def {name.rpartition(".")[2].lower()}(*args):\n    """{doc}"""\n'
        for name, doc in documents()[: 164 if rows is None else rows]
    ]


@dataclass(frozen=True, slots=True)
class Recipe:
    make: Callable[[int | None], list[str]]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0

    def rows(self, limit: int | None) -> list[dict[str, Any]]:
        settings = {"max_tokens": self.max_tokens, "n": self.n, "temperature": self.temperature}
        return [{"prompt": prompt, **settings} for prompt in self.make(limit)]


RECIPES = {
    "label": Recipe(label, 32),
    "label-noprefix": Recipe(without_prefix, 32),
    "classify": Recipe(long_instruction, 4),
    "mmlu": Recipe(mmlu, 8),
    "generate": Recipe(tutorials, 256),
    "code": Recipe(functions, 64, n=4, temperature=0.8),
}
