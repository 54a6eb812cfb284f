"""The workloads of a benchmark, from data that the repository carries: which prompts, how many tokens, how drawn.

Each has a structure of its own: one prefix for all rows, none, a long instruction with short answers, many prefixes,
decoding alone, several samples of a prompt, entries with candidates to judge. Knows no engine.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
from workloads import EXAMPLES, INSTRUCTION, ROOT, label, mmlu

Entries = list[tuple[str, str]]
CANDIDATES = 8  # of a judged entry at most
RUBRIC = "Grade one-sentence summaries of Python documentation.\n" + "".join(
    f"{number} {meaning}: {reason}\n"
    for number, (meaning, reason) in enumerate(
        [
            ("wrong", "it says what the documentation denies, or speaks of something else."),
            ("vague", "it would fit the documentation of most functions, and names neither argument nor result."),
            ("partial", "it names what is done, and leaves out when, to what, or what is returned."),
            ("right", "a reader who has nothing else calls the function as it is meant."),
        ],
        start=1,
    )
)
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


def judged(rows: int | None) -> list[str]:
    """A rubric for all, then an entry for its candidates: sentences of its own and of the next one; shuffled."""
    entries = [(name, doc) for name, doc in documents() if len(doc.split()) > 60]
    texts = []
    for (name, doc), (_, other) in zip(entries, entries[1:] + entries[:1], strict=True):
        own, foreign = (re.split(r"(?<=[.:;])\s+", text)[: CANDIDATES // 2] for text in (doc, other))
        texts += [
            f"{RUBRIC}# Documentation\n{name}\n{doc}\n# Candidate\n{text}\n\n# Grades\n" for text in own + foreign
        ]
    texts = texts[:rows]
    random.Random(0).shuffle(texts)
    return texts


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
    "judge": Recipe(judged, 64),
}
