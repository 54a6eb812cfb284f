"""`batchgen plan`: reads and tokenises the whole input and tells what a run would have to do. Loads no weights.

Knows how to bring the figures together and into words; they are counted in analysis.py.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.engine.request import Request
from batchgen.engine.spec import ModelSpec
from batchgen.pipeline.rows import Skipped, Source
from batchgen.pipeline.source import open_source
from batchgen.pipeline.store import Window, WindowWriter
from batchgen.pipeline.windows import WindowBudget

from .advice import advise
from .analysis import PromptStatistics
from .check import check_columns, check_files, check_model
from .generate import make_renderer
from .job import Job
from .models import Models
from .resolved import describe_sampling, resolve_sampling

_SAMPLE_ROWS = 10_000
_EXCERPT = 60


class Planner:
    """Reads a job's input once and keeps only counts."""

    def __init__(self, job: Job, models: Models) -> None:
        check_files(job)
        self.job = job
        self.context = check_model(job, models)
        self.source = open_source(job.input, job.base)
        check_columns(job, self.source.schema)
        self.sampling, self.origins = resolve_sampling(job, models)
        self.tokenizer = models.tokenizer(job)
        self.renderer = make_renderer(job, models, self.sampling, self.tokenizer, date.today().isoformat())
        self.statistics = PromptStatistics()
        self.errors: Counter[str] = Counter()
        self.skipped = 0
        self.answer_tokens = 0

    def read(self, budget: WindowBudget | None = None) -> None:
        """Renders and plans everything, window by window."""
        budget = budget or WindowBudget()
        with tempfile.TemporaryDirectory() as directory:
            writer = WindowWriter(Path(directory), "0")
            for request in self._requests():
                writer.add(request)
                if writer.num_rows >= budget.rows or writer.num_tokens >= budget.tokens:
                    self._close(writer.finish())
                    writer = WindowWriter(Path(directory), str(self.statistics.windows))
            self._close(writer.finish())

    def _requests(self) -> Iterator[Request]:
        """The rows that will be asked; the others are counted."""
        for batch in self.source.batches(columns=sorted(self.renderer.columns)):
            for outcome in self.renderer.render(batch):
                if isinstance(outcome, Skipped):
                    self.skipped += 1
                elif outcome.error is not None:
                    self.errors[outcome.error.code] += 1
                else:
                    self.answer_tokens += outcome.sampling.max_tokens * outcome.sampling.n
                    yield outcome

    def _close(self, window: Window) -> None:
        order, offsets = window.plan.order, window.offsets
        size = window.path.stat().st_size
        tokens = np.memmap(window.path, np.uint32, mode="r") if size else np.zeros(0, np.uint32)
        limit = self.context - self.sampling.max_tokens - self.context // 10
        self.statistics.add(tokens, offsets[order], (offsets[1:] - offsets[:-1])[order], window.plan.common, limit)
        window.path.unlink()
        window.errors_path.unlink()


def plan_job(job: Job, models: Models | None = None, as_json: bool = False) -> Iterator[str]:
    """Lines for people, or one line of JSON. Raises JobError and errors of the pipeline."""
    models = models or Models()
    planner = Planner(job, models)
    planner.read()
    advice = list(advise(job.prompt, planner.statistics, distinct_shares(planner.source, planner.renderer.columns)))
    seconds, basis = estimate(planner, models.spec(job))
    if as_json:
        yield json.dumps(_figures(planner, advice, seconds, basis), ensure_ascii=False)
    else:
        yield from _lines(planner, advice, seconds, basis)


def _figures(planner: Planner, advice: list[str], seconds: float, basis: str) -> dict[str, Any]:
    found = planner.statistics
    groups = [
        {"saved_tokens": group.saved, "rows": group.rows, "prefix_tokens": len(group.prefix),
         "excerpt": excerpt(planner.tokenizer.decode(list(group.prefix)))}
        for group in found.groups
    ]  # fmt: skip
    return {
        "rows": planner.source.num_rows,
        "failing": dict(planner.errors),
        "skipped": planner.skipped,
        "prompt_tokens": found.tokens,
        "distinct_prefix_tokens": found.distinct_tokens,
        "saved_share": round(found.saved_share, 4),
        "longest_prompt": found.longest,
        "most_answer_tokens": planner.answer_tokens,
        "histogram": {str(1 << power): int(count) for power, count in enumerate(found.histogram) if count},
        "windows": found.windows,
        "groups": groups,
        "advice": advice,
        "estimated_seconds": round(seconds, 1),
        "basis": basis,
    }


def _lines(planner: Planner, advice: list[str], seconds: float, basis: str) -> Iterator[str]:
    found, failing = planner.statistics, sum(planner.errors.values())
    codes = ", ".join(f"{count} {code}" for code, count in planner.errors.most_common())
    reasons = f" ({codes})" if codes else ""
    yield f"rows: {planner.source.num_rows}; {failing} will fail{reasons}; {planner.skipped} skipped by policy"
    yield f"prompt tokens: {found.tokens}, longest prompt {found.longest}, context {planner.context}"
    yield "prompt lengths in tokens:"
    yield from found.histogram_lines()
    yield f"distinct prefix tokens: {found.distinct_tokens}; sharing saves {found.saved_share:.1%} of the prompt tokens"
    if found.windows > 1:
        yield f"planned in {found.windows} windows; prefixes are shared within a window"
    yield f"largest prefix groups: {'none' if not found.groups else ''}".rstrip()
    for group in found.groups:
        text = excerpt(planner.tokenizer.decode(list(group.prefix)))
        yield f"  {group.rows} rows share {len(group.prefix)} tokens (saves {group.saved}): {text}"
    yield describe_sampling(planner.sampling, planner.origins)
    yield f"answer tokens: at most {planner.answer_tokens}"
    yield from (f"advice: {line}" for line in advice)
    yield f"estimated time: {duration(seconds)} ({basis})"


def excerpt(text: str) -> str:
    """Start and end of a text on one line."""
    flat = json.dumps(text, ensure_ascii=False)[1:-1]
    return f'"{flat}"' if len(flat) <= 2 * _EXCERPT else f'"{flat[:_EXCERPT]} ... {flat[-_EXCERPT:]}"'


def distinct_shares(source: Source, columns: frozenset[str]) -> dict[str, float]:
    """Share of different values in the first rows of each column that has a plain type."""
    wanted = [name for name in sorted(columns) if not pa.types.is_nested(source.schema.field(name).type)]
    seen: dict[str, list[pa.Array]] = {name: [] for name in wanted}
    rows = 0
    for batch in source.batches(columns=wanted):
        for name in wanted:
            seen[name].append(batch.columns.column(name))
        rows += batch.num_rows
        if rows >= _SAMPLE_ROWS:
            break
    return {name: pc.count_distinct(pa.chunked_array(parts)).as_py() / rows for name, parts in seen.items() if rows}


def estimate(planner: Planner, spec: ModelSpec) -> tuple[float, str]:
    """Seconds on this machine's processor, from operations to do and a short measurement; and that basis in words."""
    operations = 2 * parameters(spec) * (planner.statistics.distinct_tokens + planner.answer_tokens)
    speed = measure_operations_per_second()
    basis = (
        f"{operations:.2g} operations with every answer as long as max_tokens, at half of the "
        f"{speed / 1e9:.0f} GFLOP/s that a float32 matrix product reaches on this processor; a GPU is many times faster"
    )
    return operations / (0.5 * speed), basis


def parameters(spec: ModelSpec) -> int:
    """Weights that take part in computing one token."""
    layer = spec.hidden_size * (2 * spec.query_size + 2 * spec.key_size + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def measure_operations_per_second(size: int = 768, repeats: int = 3) -> float:
    """Multiplications and additions per second of a float32 matrix product; the best of a few."""
    left = np.ones((size, size), np.float32)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def duration(seconds: float) -> str:
    """`90 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 7200 else f"about {seconds / 3600:.1f} h"
