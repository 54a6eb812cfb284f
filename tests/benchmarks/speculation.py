"""Steps and rows per second with each drafter beside none, on rows that invite copying, in one run.

    .venv/bin/python tests/benchmarks/speculation.py [--rows 48] [--sequences 16]
        [--kinds off,ngram,suffix,auto,layer_skip,self,medusa] [--workloads extract,edit,drain,label] [--dtype bfloat16]

`extract`: a JSON object from API documentation; `edit`: a function again with one name changed; `drain`: the last 16
rows of `extract`, alone; `label`: one free sentence, where drafts have little to find. Answers must be equal in
float32; in bfloat16 the share of equal answers is told. `self` is the INT4 copy. `medusa` first trains three heads on
answers to other rows of the workload, two rows for each that is measured. One JSON line per workload and kind. Run it
alone.
"""

import argparse
import inspect
import json
import statistics as numbers
import sys
import tempfile
import textwrap
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import clock
from demo_model import demo_model_path
from workloads import WORKLOADS, entries

from batchgen import kernels
from batchgen.engine import Engine, Request, Sampling
from batchgen.engine import engine as engine_module
from batchgen.engine.draft.controller import decodes_only
from batchgen.engine.draft.training import Plan, Text, examples, split, train, write_heads
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Drawn, Step

DRAIN = 16
DRAINS = {"lengths of 16 to 106": range(16, 16 + 6 * DRAIN, 6), "equal lengths": [48] * DRAIN}  # of answers
EXTRACT_SHOTS = """\
Entry: shutil.copytree. Recursively copy a directory tree rooted at src to a directory named dst.
JSON: {"name": "copytree", "module": "shutil", "kind": "function", "summary": "Recursively copy a directory tree"}

Entry: threading.Lock. The class of primitive lock objects. Once a thread has acquired a lock, others block.
JSON: {"name": "Lock", "module": "threading", "kind": "class", "summary": "The class of primitive lock objects"}

Entry: math.gcd. Return the greatest common divisor of the specified integer arguments.
JSON: {"name": "gcd", "module": "math", "kind": "function", "summary": "Return the greatest common divisor"}

"""
EDIT_SHOT = '''\
Rename the function to total_length.

Before:
def lengths(items):
    """Return the sum."""
    result = 0
    for item in items:
        result += len(item)
    return result

After:
def total_length(items):
    """Return the sum."""
    result = 0
    for item in items:
        result += len(item)
    return result

'''


def extract(count: int) -> list[tuple[str, int]]:
    texts = [f"{EXTRACT_SHOTS}Entry: {name}. {' '.join(doc.split())[:300]}\nJSON:" for name, doc in entries(count)]
    return [(text, 48) for text in texts]


def edit(count: int) -> list[tuple[str, int]]:
    functions = [value for _, value in inspect.getmembers(textwrap, inspect.isfunction)]
    for module in (inspect, json.decoder, json.encoder, numbers):
        functions += [value for _, value in inspect.getmembers(module, inspect.isfunction)]
    sources = [textwrap.dedent(inspect.getsource(function)) for function in functions]
    chosen = [source for source in sources if 200 < len(source) < 900][:count]
    tasks = [f"{EDIT_SHOT}Rename the function to renamed.\n\nBefore:\n{source}\nAfter:\n" for source in chosen]
    return [(task, 96) for task in tasks]


def label(count: int) -> list[tuple[str, int]]:
    make, max_tokens = WORKLOADS["label"]
    return [(prompt, max_tokens) for prompt in make(count)]


def run(engine: Engine, rows: list[tuple[str, int]]) -> tuple[dict, list[list[int]]]:
    prompts = engine.tokenizer.encode([text for text, _ in rows], add_special_tokens=True)
    requests = [
        Request(key, prompt, Sampling(max_tokens=most, temperature=0, ignore_eos=True))
        for key, (prompt, (_, most)) in enumerate(zip(prompts, rows, strict=True))
    ]
    start = clock.seconds()
    answers = {completion.key: completion.tokens for completion in engine.run(requests)}
    seconds = clock.seconds() - start
    done = engine.statistics
    report = {
        "rows_per_s": round(len(rows) / seconds, 2),
        "steps": done.steps,
        "tokens_per_step": round(done.output_tokens / done.steps, 2),
        "drafted": done.drafted_tokens,
        "accepted": done.accepted_tokens,
    }
    return report, [answers[key] for key in sorted(answers)]


class Last:
    """Requests of which the last DRAIN come when all others have ended."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self.taken = self.ended = 0

    def __iter__(self) -> "Last":
        return self

    def __next__(self) -> Request:
        first = len(self._requests) - DRAIN
        if self.taken == len(self._requests) or (self.taken == first and self.ended < first):
            raise StopIteration
        self.taken += 1
        return self._requests[self.taken - 1]


class Watched(Scheduler):
    """Notes when the last step that computed a prompt was over."""

    prompts_over = 0.0

    def commit(self, step: Step, drawn: list[list[Drawn]]) -> None:
        super().commit(step, drawn)
        if not decodes_only(step):
            Watched.prompts_over = clock.seconds()


def drain_seconds(engine: Engine, lengths: Ordered[int]) -> float:
    """What the answers of the last rows of `extract`, one of each length, take from the last prompt on.

    The rows before them have taught the drafter and are over, and steps with prompts have no drafts, so that with any
    drafter the same is left to do.
    """
    rows = extract(3 * DRAIN)
    prompts = engine.tokenizer.encode([text for text, _ in rows], add_special_tokens=True)
    tokens = [*(most for _, most in rows[:-DRAIN]), *lengths]
    requests = [
        Request(key, prompt, Sampling(max_tokens=most, temperature=0, ignore_eos=True))
        for key, (prompt, most) in enumerate(zip(prompts, tokens, strict=True))
    ]
    left = Last(requests)
    with patch.object(engine_module, "Scheduler", Watched):
        for _ in engine.run(left):
            left.ended += 1
    assert left.ended == len(rows)
    return clock.seconds() - Watched.prompts_over


WITH_PATH: dict[str, Callable[[str], dict]] = {
    "self": lambda path: {"kind": "draft", "model": "self", "tokens": 4},
    "medusa": lambda path: {"kind": "medusa", "path": path},
}


def load(speculation: str | dict, args: argparse.Namespace) -> Engine:
    return Engine.load(
        str(demo_model_path()), device="cpu", dtype=args.dtype, memory="1GiB",
        max_sequences=args.sequences, speculation=speculation,
    )  # fmt: skip


def train_heads(engine: Engine, rows: list[tuple[str, int]], out: Path) -> None:
    """Heads over the engine's model, on its own answers to the rows."""
    prompts = engine.tokenizer.encode([text for text, _ in rows], add_special_tokens=True)
    _, answers = run(engine, rows)
    texts = [Text(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    plan, ops = Plan(), kernels.load("cpu")
    learn, measure = (examples(engine.model, ops, part, plan.heads) for part in split(texts, plan))
    trained = train(engine.model, learn, measure, plan)
    write_heads(out, trained, str(demo_model_path()))
    print(json.dumps({"heads": {"tokens": len(learn), "held_out_accuracy": trained.accuracy}}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--kinds", default="off,ngram,suffix,auto,layer_skip,medusa")
    parser.add_argument("--workloads", default="extract,edit,drain,label")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    workloads = {"extract": extract, "edit": edit, "label": label, "drain": lambda count: extract(count)[-DRAIN:]}
    for name in args.workloads.split(","):
        rows, first = workloads[name](args.rows), None
        for kind in args.kinds.split(","):
            with tempfile.TemporaryDirectory() as folder:
                if kind == "medusa":
                    more = (extract if name == "drain" else workloads[name])(4 * args.rows)
                    others = [row for row in more if row not in rows][: 2 * args.rows]
                    train_heads(load("off", args), others, Path(folder))
                engine = load(WITH_PATH[kind](folder) if kind in WITH_PATH else kind, args)
            report, answers = run(engine, rows)
            first = first or (report, answers)
            report["times_rows_per_s"] = round(report["rows_per_s"] / first[0]["rows_per_s"], 2)
            report["times_fewer_steps"] = round(first[0]["steps"] / report["steps"], 2)
            report["equal_answers"] = sum(a == b for a, b in zip(answers, first[1], strict=True)) / len(rows)
            if args.dtype == "float32":
                assert answers == first[1], f"{name}: {kind} changed an answer"
            print(json.dumps({"workload": name, "speculation": kind, **report}), flush=True)


if __name__ == "__main__":
    main()
