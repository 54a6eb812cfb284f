"""What forced tokens and the trie of choices gain over masks alone: rows per second, same model, same rows, one run.

    .venv/bin/python tests/benchmarks/structured.py [--rows 64] [--dtype bfloat16]

`extract` fills a JSON schema of five short fields, `record` one of twelve as they are usual, `classify` picks one of
eight categories; all behind one prefix, at temperature 0.
In float32 the answers with forced tokens must be those of masks alone; in bfloat16 a token may round otherwise beside
others. Prints one JSON line. Run it with nothing else running.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import clock
from demo_model import demo_model_path
from workloads import entries, label

from batchgen.engine import Completion, Engine, Grammar, Request, Sampling

CATEGORIES = ["io", "text", "math", "data structures", "concurrency", "networking", "testing", "system"]
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"enum": CATEGORIES},
        "returns_a_value": {"type": "boolean"},
        "raises_exceptions": {"type": "boolean"},
        "audience": {"enum": ["beginners", "experienced programmers"]},
        "summary": {"type": "string", "maxLength": 40},
    },
    "required": ["category", "returns_a_value", "raises_exceptions", "audience", "summary"],
    "additionalProperties": False,
}
VERSION = {"type": "string", "pattern": "^3\\.[0-9]{1,2}$"}
AVAILABILITY = {
    "minimum_python_version": VERSION,
    "deprecated_since_version": {"anyOf": [{"type": "null"}, VERSION]},
    "operating_systems": {"enum": ["all", "linux", "windows", "macos"]},
}
FIELDS = {
    "object_kind": {"enum": ["function", "class", "method", "constant", "exception"]},
    "category": {"enum": CATEGORIES},
    "returns_a_value": {"type": "boolean"},
    "raises_exceptions": {"type": "boolean"},
    "number_of_parameters": {"type": "integer", "minimum": 0, "maximum": 20},
    "audience": {"enum": ["beginners", "experienced programmers"]},
    "first_released": {"type": "string", "format": "date"},
    "availability": {
        "type": "object", "properties": AVAILABILITY, "required": list(AVAILABILITY), "additionalProperties": False
    },
    "thread_safety": {"enum": ["safe", "unsafe", "not documented"]},
    "summary": {"type": "string", "maxLength": 60},
}  # fmt: skip
RECORD_SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
EXTRACT = Sampling(max_tokens=160, temperature=0, grammar=Grammar.json_schema(SCHEMA))
RECORD = Sampling(max_tokens=320, temperature=0, grammar=Grammar.json_schema(RECORD_SCHEMA))
EXTRACTIONS = {"five short fields": EXTRACT, "record of twelve fields": RECORD}
CLASSIFY = Sampling(max_tokens=8, temperature=0, grammar=Grammar.choices([f" {name}" for name in CATEGORIES]))


def names_alone(count: int) -> list[str]:
    """Rows of a few tokens behind one instruction."""
    return [f"Which part of the library is it?\n\nEntry: {name}\nPart:" for name, _ in entries(count)]


LONG_LABELS = [f" It belongs to the part about {name}." for name in CATEGORIES]
CLASSIFICATIONS = {  # prompts, labels, rows that fill steps
    "documents, short labels": (label, [f" {name}" for name in CATEGORIES], 32),
    "names, short labels": (names_alone, [f" {name}" for name in CATEGORIES], 96),
    "names, labels that are sentences": (names_alone, LONG_LABELS, 96),
}
WAYS = "masks", "forced", "scored"  # token by token; only where choices differ; every choice, without a decode loop


def timed(
    engine: Engine, prompts: list[list[int]], sampling: Sampling, forcing: bool
) -> tuple[float, list[Completion]]:
    """Rows per second, the better of two runs, and the answers in order."""
    engine.grammars.set_forcing(forcing)
    best = 0.0
    for _ in range(2):
        start = clock.seconds()
        requests = [Request(key, prompt, sampling) for key, prompt in enumerate(prompts)]
        found = sorted(engine.run(requests), key=lambda completion: completion.key)
        best = max(best, len(prompts) / (clock.seconds() - start))
    assert all(completion.error is None for completion in found)
    return best, found


def compare(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> dict:
    masked, expected = timed(engine, prompts, sampling, forcing=False)
    forced, answers = timed(engine, prompts, sampling, forcing=True)
    equal = sum(one.tokens == other.tokens for one, other in zip(answers, expected, strict=True)) / len(answers)
    assert equal == 1 or str(engine.resolved["dtype"]) != "float32"
    statistics = engine.statistics
    share = round(statistics.forced_tokens / statistics.output_tokens, 3)
    return {
        "masks": round(masked, 2),
        "forced": round(forced, 2),
        "gain": round(forced / masked, 2),
        "share": share,
        "equal": equal,
    }


def forcing_gain(engine: Engine, groups: list[list[list[int]]], sampling: Sampling) -> tuple[float, float]:
    """How many times as fast groups of prompts are answered with forced tokens as with masks alone, one group after
    the other, each by turns; and how many tokens an answer has in the mean.
    """
    seconds, tokens = {False: 0.0, True: 0.0}, 0
    for number, group in enumerate(groups):
        answers = {}
        for forcing in list(seconds)[:: 1 if number % 2 == 0 else -1]:
            engine.grammars.set_forcing(forcing)
            start = clock.seconds()
            found = engine.run([Request(key, prompt, sampling) for key, prompt in enumerate(group)])
            answers[forcing] = {completion.key: completion.tokens for completion in found}
            seconds[forcing] += clock.seconds() - start
            tokens += engine.statistics.output_tokens
        assert answers[True] == answers[False] or str(engine.resolved["dtype"]) != "float32"
    return seconds[False] / seconds[True], tokens / sum(map(len, groups)) / len(seconds)


def choice_ways(engine: Engine, prompts: list[list[int]], labels: list[str]) -> dict[str, dict[str, float]]:
    """Rows per second, tokens fed per row and steps of each way to choose a label."""
    drawn = Sampling(max_tokens=24, temperature=0, grammar=Grammar.choices(labels))
    found = {}
    for way in WAYS:
        sampling = replace(drawn, choice_probs=way == "scored")
        rate, _ = timed(engine, prompts, sampling, forcing=way != "masks")
        fed = engine.statistics.fed_tokens / len(prompts)
        found[way] = {"rows_per_s": round(rate, 2), "tokens": round(fed, 1), "steps": engine.statistics.steps}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype=args.dtype, speculation="off")
    prompts = engine.tokenizer.encode(label(args.rows), add_special_tokens=True)
    extract, record, classify = (compare(engine, prompts, sampling) for sampling in (EXTRACT, RECORD, CLASSIFY))
    scored, _ = timed(engine, prompts, replace(CLASSIFY, choice_probs=True), forcing=True)
    classify |= {"trie": round(scored, 2), "trie_gain": round(scored / classify["masks"], 2)}
    found = {"extract": extract, "record": record, "classify": classify}
    print(json.dumps({"rows": args.rows, "dtype": args.dtype, **found}))


if __name__ == "__main__":
    main()
