"""Rows per second of every workload beside other engines, the roofline and the engine with one feature off at a time.

    .venv/bin/python tests/benchmarks/compare.py [--workload label] [--rows 256] [--prompts DIR] [--ablation]
        [--peer transformers] [--peer vllm=PYTHON] [--peer llama.cpp=SERVER] [--peer-rows 64] [--out FILE.json]

Every engine gets the same token ids, both cores and the number of tokens to make; all run in one go, one after the
other. DIR holds NAME.jsonl files with `prompt`, `max_tokens` and perhaps `n` and `temperature`; without it the prompts
are built from data of the repository. A speed is printed only if the first rows get the tokens of the reference
backend: at the first difference the token must be one that the reference finds nearly as likely. Run it with nothing
else running. Prints a Markdown table; the file gets every figure.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from demo_model import demo_model_path, demo_reference
from measure import Measure, run_peer
from prompts import RECIPES
from roofline import Machine, Size, bound, distinct_tokens, measure_machine, size_of

from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.models import architecture
from batchgen.engine.tokenizer import load_tokenizer

Row = dict[str, Any]
ROOFLINES = {"native": "bfloat16", "int8": "int8", "int4": "int8"}  # number format of the products, by weights
CHECKED_ROWS, CHECKED_TOKENS, TOP = 4, 12, 8
NEAR = 1.5  # nat: a token this near to the reference's best may be a tie: bfloat16 moved one of 350 of INT8 by 1.4
PEER_BATCH = 16
PEERS = ("transformers", "vllm", "llama.cpp")
ABLATIONS: dict[str, dict[str, Any]] = {
    "no prefix sharing": {"prefix_sharing": False},
    "shared keys read once for every row": {"shared_items": False},
    "rows in the order of the file": {"ordered": False},
    "no native kernels": {"kernels": "reference"},
    "weights in bfloat16": {"weights": "native"},
    "KV in int8": {"kv_cache": "int8"},
    "KV in int4": {"kv_cache": "int4"},
    "steps of 128 tokens": {"max_batch_tokens": 128},
    "steps of 2048 tokens": {"max_batch_tokens": 2048},
    "16 sequences at a time": {"max_sequences": 16},
    "speculation off": {"speculation": "off"},
    "suffix drafts at every step": {"speculation": "suffix"},
}


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine in one format on one workload."""

    workload: str
    engine: str
    form: str
    measure: Measure
    share: float | None  # of the roofline of its format
    computed: float | None  # prompt tokens, over distinct ones
    alike: float | None = None  # share of tokens equal to the run it is an ablation of


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs have in common."""

    model: str
    peer_model: Callable[[], str]
    size: Size
    machine: Machine

    def ours(self, workload: Workload, form: str, **changes: Any) -> Measure:
        options = {"model": self.model, "dtype": "bfloat16", **formats(form), **changes}
        return run_peer(sys.executable, "batchgen_rows.py", workload.rows, options)

    def entry(self, workload: Workload, engine: str, form: str, measure: Measure) -> Entry:
        numbers = ROOFLINES.get(form.partition("/")[0], "bfloat16")
        limit = bound(workload.rows[: measure.rows], self.size, self.machine, numbers)
        distinct = distinct_tokens(workload.rows[: measure.rows])
        share = measure.rows_per_s / limit
        return Entry(workload.name, engine, form, measure, share, measure.computed_prompt_tokens / distinct)


def formats(form: str) -> dict[str, str]:
    """`int8`, or `int8/int8` with a format of the keys."""
    weights, _, keys = form.partition("/")
    return {"weights": weights, "kv_cache": keys or "auto"}


def tokenised(model: str, name: str, rows: list[Row]) -> Workload:
    ids = load_tokenizer(model, None).encode([row["prompt"] for row in rows], add_special_tokens=True)
    settings = [{"max_tokens": row["max_tokens"], "n": row.get("n", 1)} for row in rows]
    heats = [row.get("temperature", 0.0) for row in rows]
    parts = zip(ids, settings, heats, strict=True)
    return Workload(name, [{"tokens": tokens, **values, "temperature": heat} for tokens, values, heat in parts])


def read_rows(name: str, prompts: Path | None, limit: int | None) -> list[Row]:
    if prompts is None:
        if name not in RECIPES:
            raise click.ClickException(f"--workload: no {name}, without --prompts there are {', '.join(RECIPES)}")
        return RECIPES[name].rows(limit)
    path = prompts / f"{name}.jsonl"
    if not path.is_file():
        raise click.ClickException(f"--prompts: no {path.name} in {prompts}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]


def check(bench: Bench, workload: Workload, form: str) -> None:
    """Raises SystemExit when the first rows, drawn greedily, are not those of the reference backend."""
    length = min(CHECKED_TOKENS, workload.rows[0]["max_tokens"])
    few = [{**row, "max_tokens": length, "n": 1, "temperature": 0.0} for row in workload.rows[:CHECKED_ROWS]]
    short = replace(workload, rows=few)
    native, reference = bench.ours(short, form), bench.ours(short, form, kernels="reference", top=TOP)
    for row, (mine, true, tops) in enumerate(zip(native.answers, reference.answers, reference.tops, strict=True)):
        first = agreement(mine[0], true[0])
        if first == length:
            continue
        chances = {int(token): chance for token, chance in tops[first]}
        behind = tops[first][0][1] - chances.get(mine[0][first], float("-inf"))
        if behind > NEAR:
            raise SystemExit(
                f"{workload.name}, {form}: row {row} differs from the reference at token {first} "
                f"by {behind:.2f} nat; no speed is printed for wrong answers"
            )


def agreement(mine: list[int], other: list[int]) -> int:
    """Tokens up to the first difference."""
    return next((at for at, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))


def alike(first: Measure, second: Measure) -> float:
    """Share of tokens that are equal up to the first difference of each answer."""
    pairs = [
        (a, b)
        for left, right in zip(first.answers, second.answers, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    same = sum(agreement(a, b) for a, b in pairs)
    return same / sum(len(a) for a, _ in pairs)


def peer_measure(bench: Bench, peer: str, workload: Workload, rows: int | None) -> Measure:
    """A peer is `transformers`, `vllm=PYTHON` or `llama.cpp=SERVER`."""
    name, _, program = peer.partition("=")
    few = workload.rows[:rows]
    options = {"dtype": "bfloat16", "batch": PEER_BATCH}
    if name == "llama.cpp":
        return run_peer(sys.executable, "llama_cpp_rows.py", few, {"model": bench.model, "server": program, **options})
    script = {"transformers": "transformers_rows.py", "vllm": "vllm_rows.py"}[name]
    return run_peer(program or sys.executable, script, few, {"model": bench.peer_model(), **options})


def entries(
    bench: Bench,
    workload: Workload,
    weights: tuple[str, ...],
    peers: tuple[str, ...],
    peer_rows: int | None,
    changed: Iterable[str],
) -> Iterator[Entry]:
    for form in weights:
        check(bench, workload, form)
        measure = bench.ours(workload, form)
        yield bench.entry(workload, "batchgen", form, measure)
    for peer in peers:
        name = peer.partition("=")[0]
        form = "gguf" if name == "llama.cpp" else "native"
        yield bench.entry(workload, name, form, peer_measure(bench, peer, workload, peer_rows))
    for name in changed:
        other = bench.ours(workload, weights[-1], **ABLATIONS[name])
        entry = bench.entry(workload, name, ABLATIONS[name].get("weights", weights[-1]), other)
        yield replace(entry, alike=alike(measure, other))


def line(entry: Entry) -> str:
    measure = entry.measure
    cells = (
        entry.workload,
        entry.engine,
        {"native": "bfloat16"}.get(entry.form, entry.form),
        str(measure.rows),
        f"{measure.rows_per_s:.2f}",
        f"{measure.rows_per_s_with_load:.2f}",
        "" if entry.share is None else f"{entry.share:.2f}",
        "" if entry.computed is None else f"{entry.computed:.2f}",
        f"{measure.first_row_s:.1f}",
        f"{measure.peak_bytes / 2**20:.0f}",
        "" if entry.alike is None else f"{entry.alike:.0%}",
        f"{measure.disturbed:.0%}",
    )
    return f"| {' | '.join(cells)} |"


HEADS = (
    *("workload", "engine", "format", "rows", "rows/s", "with load", "of roofline", "computed / distinct"),
    *("first row s", "MiB", "same tokens", "other load"),
)


def peer_model_in(place: Path) -> Callable[[], str]:
    """Writes the demo model as a checkpoint that other engines read, when first asked."""

    def path() -> str:
        if not place.exists():
            disable_progress_bar()
            demo_reference().to(torch.bfloat16).save_pretrained(place)
            demo_reference().float()
        return str(place)

    return path


@click.command()
@click.option("--workload", "names", multiple=True, help=f"Repeatable; default: {', '.join(RECIPES)}.")
@click.option("--rows", type=int, help="Of each workload; default: all.")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder of NAME.jsonl.")
@click.option("--model", help="Of batchgen and llama.cpp; default: the demo's GGUF file.")
@click.option("--peer-model", help="Folder with safetensors for the others; default: written from the demo's file.")
@click.option("--weights", multiple=True, default=("native", "int4"), help="Repeatable; with keys: int8/int8.")
@click.option("--peer", "peers", multiple=True, help="transformers, vllm=PYTHON or llama.cpp=SERVER; repeatable.")
@click.option("--peer-rows", type=int, help="Fewer rows for the others.")
@click.option("--ablation", is_flag=True, help="Also with each feature off alone, in the last of the formats.")
@click.option("--only", "chosen", multiple=True, type=click.Choice(list(ABLATIONS)), help="Of --ablation; repeatable.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for every figure, as JSON.")
def main(
    names: tuple[str, ...],
    rows: int | None,
    prompts: Path | None,
    model: str | None,
    peer_model: str | None,
    weights: tuple[str, ...],
    peers: tuple[str, ...],
    peer_rows: int | None,
    ablation: bool,
    chosen: tuple[str, ...],
    out: Path | None,
) -> None:
    unknown = [peer for peer in peers if peer.partition("=")[0] not in PEERS]
    if unknown:
        raise click.ClickException(f"--peer: {unknown[0]} is none of {', '.join(PEERS)}")
    changed = (chosen or ABLATIONS) if ablation else ()
    path = model or str(demo_model_path())
    config = open_checkpoint(path, None).config
    spec = architecture(config).spec(config)
    machine = measure_machine(spec)
    rates = ", ".join(f"{form} {rate / 1e9:.0f} GFLOP/s" for form, rate in machine.flops.items())
    click.echo(f"{psutil.cpu_count(logical=False)} cores; {rates}; memory {machine.bandwidth / 1e9:.1f} GB/s\n")
    click.echo(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
    found: list[Entry] = []
    with tempfile.TemporaryDirectory() as place:
        given = peer_model_in(Path(place) / "model") if peer_model is None else (lambda: str(peer_model))
        bench = Bench(path, given, size_of(spec), machine)
        for name in names or RECIPES:
            workload = tokenised(path, name, read_rows(name, prompts, rows))
            for entry in entries(bench, workload, weights, peers, peer_rows, changed):
                click.echo(line(entry))
                found.append(entry)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report(machine, found), indent=1), encoding="utf-8")


def report(machine: Machine, found: list[Entry]) -> dict[str, Any]:
    def plain(entry: Entry) -> dict[str, Any]:
        own = {name: getattr(entry, name) for name in ("workload", "engine", "form", "share", "computed", "alike")}
        return {**own, **entry.measure.summary()}

    return {"flops": machine.flops, "bandwidth": machine.bandwidth, "runs": [plain(entry) for entry in found]}


if __name__ == "__main__":
    main()
