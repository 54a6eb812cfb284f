"""What speculation and grammars bring: the bars that they must reach, and every way to answer with a label.

Measures for `choices.py`, which prints them.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import clock
import speculation
import structured
from demo_model import demo_model_path

from batchgen.engine import Engine
from batchgen.engine.config import EngineSettings

MEMORY = "1GiB"
FEW = 4  # rows, as in a preview or at the end of a job
GROUPS = {  # by number format: rows at once, how many times other ones; float32 takes its time
    "bfloat16": ((FEW, 4), (4 * FEW, 3), (12 * FEW, 1)),
    "float32": ((FEW, 1), (4 * FEW, 1)),
}
DRAIN_SECONDS = 20  # for each kind of drain, at least: it is short, and the machine's speed differs
LABEL_HEADS = (
    *("labels", "rows", "masks, rows/s", "times, rest forced", "times, scored"),
    *("tokens a row: masks / forced / scored", "steps"),
)


def bars(dtype: str) -> Iterator[tuple[str, float, float]]:
    """Each with what it came to and what it must reach."""
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype=dtype, memory=MEMORY, speculation="off")
    for name, make in (("extract", speculation.extract), ("edit", speculation.edit)):
        off, drafted = (steps(engine, make(24), kind) for kind in ("off", "suffix"))
        yield f"{name}: times fewer steps with suffix", off / drafted, 1.5


def forced(dtype: str) -> Iterator[tuple[str, float, float]]:
    """Extraction with forced tokens beside masks alone, by rows at once."""
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype=dtype, memory=MEMORY, speculation="off")
    prompts = engine.tokenizer.encode(structured.label(12 * FEW), add_special_tokens=True)
    for name, sampling in structured.EXTRACTIONS.items():
        for rows, times in GROUPS[dtype]:
            groups = [prompts[first : first + rows] for first in range(0, rows * times, rows)]
            gain, tokens = structured.forcing_gain(engine, groups, sampling)
            yield f"forced tokens over masks, {name} ({tokens:.0f} tokens), {rows} rows at once", gain, 1.3


def drains(dtype: str) -> Iterator[tuple[str, float, float]]:
    """How many times sooner a job's last rows end under `auto`, and what it must reach."""
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype=dtype, memory=MEMORY, speculation="off")
    for name, lengths in speculation.DRAINS.items():
        seconds: dict[str, list[float]] = {"off": [], "auto": []}
        end = clock.seconds() + DRAIN_SECONDS
        while clock.seconds() < end:
            for kind in list(seconds)[:: 1 if len(seconds["off"]) % 2 == 0 else -1]:
                seconds[kind].append(drained(engine, kind, lengths))
        off, auto = (median(taken) for taken in seconds.values())
        yield f"drain of {speculation.DRAIN} rows, {name}", off / auto, 1.3


def labels() -> Iterator[dict[str, Any]]:
    """For each kind of labels and number of rows: every way to answer, its rows per second, tokens and steps."""
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype="bfloat16", memory=MEMORY, speculation="off")
    for name, (texts, choices, most) in structured.CLASSIFICATIONS.items():
        for rows in (most, FEW):
            prompts = engine.tokenizer.encode(texts(rows), add_special_tokens=True)
            yield {"labels": name, "rows": rows, **structured.choice_ways(engine, prompts, choices)}


def label_line(one: dict[str, Any]) -> str:
    ways = [one[way] for way in structured.WAYS]
    gains = [f"{way['rows_per_s'] / ways[0]['rows_per_s']:.2f}" for way in ways[1:]]
    cells = [one["labels"], one["rows"], f"{ways[0]['rows_per_s']:.1f}", *gains]
    cells += [" / ".join(str(way[what]) for way in ways) for what in ("tokens", "steps")]
    return f"| {' | '.join(map(str, cells))} |"


def steps(engine: Engine, rows: list[tuple[str, int]], kind: str) -> int:
    engine.adopt(EngineSettings(speculation=kind, max_sequences=16))
    return int(speculation.run(engine, rows)[0]["steps"])


def drained(engine: Engine, kind: str, lengths: Sequence[int]) -> float:
    """Seconds of the last rows of a job, one for each length, whose drafter has seen those before."""
    engine.adopt(EngineSettings(speculation=kind, max_sequences=speculation.DRAIN))
    return speculation.drain_seconds(engine, lengths)
