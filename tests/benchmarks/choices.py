"""What `auto` takes beside settings chosen by hand, and what speculation and grammars bring, in one run.

    .venv/bin/python tests/benchmarks/choices.py [--prompts DIR] [--workload label] [--repeats 3] [--seconds 450]
        [--part bars] [--part forced] [--part drains] [--part labels] [--part workloads] [--dtype float32] [--out FILE]
    .venv/bin/python tests/benchmarks/choices.py --table FILE.json...

For every workload `auto` goes the way of a job: the accuracy gate on its prompts, the cost model, the engine. By hand:
one setting after another is changed around the weights that auto took, bfloat16 keys, 512 tokens a step and no drafts.
All of them run turn by turn in one process, `--repeats` times, and the best of each counts; what is 18 % behind in one
turn runs no further ones. Formats that the gate refuses are shown, but are no competition. Rows are as many as fit the
time. `--table` prints such runs as one table.

The bars: steps that drafts save. Forced: extraction with the tokens that a grammar leaves no choice for, beside masks
alone. The drains: the last rows of a job with drafts and without, whose answers differ in length, or do not. The
labels: choices beside drawing one token by token under its mask, with the rest of a choice forced and with all choices
scored, for many rows and for few, with the tokens and steps that each takes. Run it alone.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import clock
from bars import LABEL_HEADS, MEMORY, bars, drains, forced, label_line, labels
from compare import read_rows, tokenised
from demo_model import demo_model_path
from prompts import RECIPES

from batchgen.engine import Engine, Request, Sampling
from batchgen.engine.config import EngineSettings
from batchgen.jobs import Job
from batchgen.jobs.choices import Situation
from batchgen.jobs.formats import with_formats
from batchgen.jobs.models import Models

BY_HAND = ("auto", 512, "off")  # keys, tokens a step, speculation
CHANGED: tuple[tuple[int, tuple[Any, ...]], ...] = ((0, ("int8",)), (1, (256, 2048)), (2, ("suffix",)))
WEIGHTS = "native", "int8", "int4"
BARS = {"bars": bars, "forced": forced, "drains": drains}
PARTS = *BARS, "labels", "workloads"
BAR_SECONDS = {"bars": 30, "forced": 90, "drains": 60}  # of the whole
LEAST_ROWS = 12
BEHIND = 1.18  # times the seconds of the best


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings under a name; `allowed`: the gate lets its formats pass."""

    name: str
    weights: str
    kv_cache: str
    limits: EngineSettings
    allowed: bool = True


@dataclass(slots=True)
class Result:
    configuration: Configuration
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds, default=0.0)


class Engines:
    """The demo model in each weight format, loaded once, with pages in each KV format."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str], Engine] = {}

    def take(self, chosen: Configuration) -> Engine:
        key = chosen.weights, "bfloat16" if chosen.kv_cache == "auto" else chosen.kv_cache
        if key not in self._loaded:
            self._loaded[key] = Engine.load(
                str(demo_model_path()), device="cpu", dtype="bfloat16", weights=chosen.weights, memory=MEMORY,
                kv_cache=key[1],
            )  # fmt: skip
        self._loaded[key].adopt(chosen.limits)
        return self._loaded[key]


def requests_of(rows: list[dict[str, Any]]) -> list[Request]:
    return [
        Request(
            key,
            row["tokens"],
            Sampling(max_tokens=row["max_tokens"], n=row["n"], temperature=row["temperature"], ignore_eos=True),
        )
        for key, row in enumerate(rows)
    ]


def run(engine: Engine, requests: list[Request]) -> float:
    start = clock.seconds()
    failed = [completion.error for completion in engine.run(requests) if completion.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} rows failed: {failed[0]}")
    return clock.seconds() - start


def job() -> Job:
    sections = {"input": {"path": "rows.jsonl"}, "prompt": {"text": "{{ prompt }}"}, "output": {"path": "out"}}
    model = {"path": str(demo_model_path()), "dtype": "bfloat16"}
    return Job.model_validate({"name": "bench", "model": model, "engine": {"memory": MEMORY}, **sections})


def by_auto(requests: list[Request]) -> tuple[Configuration, dict[str, Any]]:
    """What a job of these rows would take, and what its manifest would say."""
    models, asked = Models(), job()
    situation = Situation.of(asked, models, requests[:128], len(requests))
    formats = models.formats(asked, lambda: [request.prompt for request in requests[:128]], situation.shares())
    settled = {"weights": formats.weights, "kv_cache": formats.kv_cache}
    chosen = situation.choose(settled)
    settings = chosen.settings
    limits = EngineSettings(
        max_batch_tokens=settings.max_batch_tokens,
        max_sequences=settings.max_sequences,
        speculation="auto" if settings.speculation else "off",
    )
    record = {"trials": formats.trials, "settings": asdict(settings), "predicted": asdict(chosen.predicted)}
    assert with_formats(asked, settled).model.weights == formats.weights
    return Configuration("auto", formats.weights, formats.kv_cache, limits), record


def by_hand(taken: str, trials: list[dict[str, Any]]) -> Iterator[Configuration]:
    """The settings beside which auto must stand; formats that failed the gate are marked."""
    refused = {(trial["kind"], trial["format"]) for trial in trials if not trial["taken"]}
    rows = [(weights, *BY_HAND) for weights in sorted(WEIGHTS, key=lambda weights: weights != taken)]
    for place, values in CHANGED:
        rows += [(taken, *BY_HAND[:place], value, *BY_HAND[place + 1 :]) for value in values]
    for weights, keys, tokens, drafts in rows:
        limits = EngineSettings(max_batch_tokens=tokens, max_sequences=256, speculation=drafts)
        allowed = ("weights", weights) not in refused and ("kv_cache", keys) not in refused
        kv_cache = "bfloat16" if keys == "auto" else keys
        yield Configuration(f"{weights}, {kv_cache} keys, {tokens}, {drafts}", weights, keys, limits, allowed)


def compare(engines: Engines, name: str, rows: list[dict[str, Any]], seconds: float, repeats: int) -> dict[str, Any]:
    """One workload: auto, auto without drafts, and all by hand, turn by turn."""
    auto, record = by_auto(requests_of(rows))
    off = replace(auto, name="auto, drafts off", limits=auto.limits.model_copy(update={"speculation": "off"}))
    hand = list(by_hand(auto.weights, list(record["trials"])))
    results = [Result(one) for one in (auto, off, *hand)]
    for chosen in {id(engines.take(one.configuration)): one.configuration for one in results}.values():
        run(engines.take(chosen), requests_of(rows[:2]))  # first calls set up thread pools
    few = requests_of(rows[: fitting(engines, auto, rows, seconds / (repeats * len(results)))])
    for turn in range(repeats):
        for result in beside_best(results)[:: 1 if turn % 2 == 0 else -1]:
            result.seconds.append(run(engines.take(result.configuration), few))
    best = min(
        (one for one in results if one.configuration.allowed and one.configuration in hand), key=lambda x: x.best
    )
    return {
        "workload": name,
        "rows": len(few),
        "auto": describe(auto),
        "auto_rows_per_s": round(len(few) / results[0].best, 2),
        "off_over_auto": round(results[1].best / results[0].best, 3),
        "best_hand": best.configuration.name,
        "best_hand_rows_per_s": round(len(few) / best.best, 2),
        "auto_over_best": round(best.best / results[0].best, 3),
        "predicted_rows_per_s": round(len(rows) / record["predicted"]["seconds"], 2),
        "seconds": {one.configuration.name: [round(took, 3) for took in one.seconds] for one in results},
        "by_hand": {
            one.configuration.name + ("" if one.configuration.allowed else " (refused)"): round(len(few) / one.best, 2)
            for one in results[2:]
        },
    }


def beside_best(results: list[Result]) -> list[Result]:
    """`auto`, also without drafts, and what may still turn out the best by hand: not what was far behind in a turn."""
    limit = BEHIND * min(one.best for one in results)
    return [one for place, one in enumerate(results) if place < 2 or one.best <= limit]


def fitting(engines: Engines, auto: Configuration, rows: list[dict[str, Any]], seconds: float) -> int:
    """How many rows take about so long."""
    few = min(len(rows), 2 * LEAST_ROWS)
    took = run(engines.take(auto), requests_of(rows[:few]))
    return max(min(LEAST_ROWS, len(rows)), min(len(rows), int(few * seconds / took)))


def describe(chosen: Configuration) -> str:
    limits = chosen.limits
    keys = "bfloat16" if chosen.kv_cache == "auto" else chosen.kv_cache
    sizes = f"{limits.max_batch_tokens}, {limits.max_sequences} at once"
    return f"{chosen.weights}, {keys} keys, {sizes}, {limits.speculation}"


def workload_table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Rows per second of every workload under every setting by hand, and what auto took."""
    columns = list(BY_HAND_COLUMNS)
    yield f"| workload | {' | '.join(columns)} | auto took | rows/s | of the best | of its drafts off |"
    yield f"|{'---|' * (len(columns) + 5)}"
    for one in found:
        cells = [by_column(one, column) for column in columns]
        name = f"`{one['workload']}`, {one['rows']} rows"
        taken = [one["auto"], one["auto_rows_per_s"], one["auto_over_best"], one["off_over_auto"]]
        yield f"| {' | '.join(map(str, [name, *cells, *taken]))} |"


def by_column(one: dict[str, Any], column: str) -> str:
    weights = one["auto"].partition(",")[0]
    wanted = BY_HAND_COLUMNS[column].format(taken=weights)
    for name, rate in one["by_hand"].items():
        if name.removesuffix(" (refused)") == wanted:
            return f"({rate})" if name.endswith("(refused)") else str(rate)
    return ""


def line(one: dict[str, Any]) -> str:
    cells = (
        one["workload"], one["rows"], one["auto"], one["auto_rows_per_s"], one["off_over_auto"], one["best_hand"],
        one["best_hand_rows_per_s"], one["auto_over_best"], one["predicted_rows_per_s"],
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


BY_HAND_COLUMNS = {
    "bfloat16": "native, bfloat16 keys, 512, off",
    "int8": "int8, bfloat16 keys, 512, off",
    "int4": "int4, bfloat16 keys, 512, off",
    "int8 keys": "{taken}, int8 keys, 512, off",
    "256 a step": "{taken}, bfloat16 keys, 256, off",
    "2048 a step": "{taken}, bfloat16 keys, 2048, off",
    "suffix drafts": "{taken}, bfloat16 keys, 512, suffix",
}
HEADS = (
    *("workload", "rows", "auto took", "rows/s", "times off", "best by hand", "rows/s", "auto / best"),
    "predicted rows/s",
)


@click.command()
@click.option("--workload", "names", multiple=True, help=f"Repeatable; default: {', '.join(RECIPES)}.")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder of NAME.jsonl.")
@click.option("--repeats", type=int, default=3, show_default=True)
@click.option("--seconds", type=float, default=450, show_default=True, help="For everything, about.")
@click.option("--part", "parts", multiple=True, default=PARTS, help="Repeatable; default: all.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", help="Of the bars, forced and drains."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for every figure, as JSON.")
@click.option("--table", is_flag=True, help="Runs nothing: FILES of earlier runs as one Markdown table.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(
    names: tuple[str, ...],
    prompts: Path | None,
    repeats: int,
    seconds: float,
    parts: tuple[str, ...],
    dtype: str,
    out: Path | None,
    table: bool,
    files: tuple[Path, ...],
) -> None:
    if table:
        earlier = [one for file in files for one in json.loads(file.read_text(encoding="utf-8"))["workloads"]]
        print("\n".join(workload_table(earlier)))
        return
    names = names or tuple(RECIPES)
    found: dict[str, Any] = {"workloads": [], "bars": {}, "labels": []}
    bounded = [measure(dtype) for part, measure in BARS.items() if part in parts]
    for bar, reached, wanted in chain(*bounded):
        found["bars"][bar] = {"is": round(reached, 2), "bar": wanted}
        print(f"{bar}: {reached:.2f} (bar {wanted}{'' if reached >= wanted else ', missed'})", flush=True)
    if "labels" in parts:
        print(f"| {' | '.join(LABEL_HEADS)} |\n|{'---|' * len(LABEL_HEADS)}", flush=True)
    for one in labels() if "labels" in parts else ():
        found["labels"].append(one)
        print(label_line(one), flush=True)
    spent = sum(BAR_SECONDS.get(part, 0) for part in parts) + 12 * len(names)  # 12 s: the gate and the first calls
    if "workloads" not in parts:
        names = ()
    engines = Engines()
    if names:
        print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    for name in names:
        rows = tokenised(str(demo_model_path()), name, read_rows(name, prompts, None)).rows
        found["workloads"].append(compare(engines, name, rows, max(15.0, (seconds - spent) / len(names)), repeats))
        print(line(found["workloads"][-1]), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
