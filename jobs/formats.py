"""The number formats of a job: settled once, kept in the manifest, so that a resume computes in the same ones.

Knows when they are asked for and how they are told; which formats are good enough is decided in the engine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.engine.plan import plan
from batchgen.engine.request import Request
from batchgen.pipeline.prompt import Renderer
from batchgen.pipeline.rows import Source

from .job import Job
from .models import Models

FIRST_ROWS = 128  # of the input, rendered for the choices and their measurement
WORTH_TOKENS = 250_000  # of a job: a measurement takes about 10,000, and a faster format saves a quarter or so
_KINDS = {"weights": "weights", "kv_cache": "KV cache"}

Formats = dict[str, Any]  # asked, weights, kv_cache, trials, note: JSON values


@dataclass(frozen=True)
class Work:
    """The rows a run has to answer; `answer_tokens`: most tokens of all samples of one."""

    rows: int
    answer_tokens: int

    def tokens(self, prompts: Iterable[Sequence[int]]) -> float:
        """Tokens to compute, if all prompts share as much as `prompts` do and answers are half as long as they may."""
        sample = list(prompts)
        if not sample:
            return 0.0
        return self.rows * (plan(sample).distinct_tokens / len(sample) + self.answer_tokens / 2)


def settle_formats(
    job: Job,
    models: Models,
    stored: Mapping[str, Any],
    prompts: Callable[[], Iterable[Sequence[int]]],
    work: Work,
    shares: Callable[[], Mapping[str, Mapping[str, float]]] = lambda: {"weights": {}, "kv_cache": {}},
) -> Formats:
    """The stored formats of an earlier run as far as the job still leaves them open, else those of a measurement.

    `shares`: the job's predicted time by kind and format, beside that with native ones. A job too short to pay for a
    measurement computes in what it asks for, and natively where it leaves that open.
    """
    asked = {"weights": job.model.weights, "kv_cache": job.engine.kv_cache}
    if stored.get("asked") == asked:
        return dict(stored)
    kept = stored["weights"] if stored and stored["asked"]["weights"] == asked["weights"] else asked["weights"]
    tokens = work.tokens(prompts())
    if tokens < WORTH_TOKENS:
        weights = "native" if kept == "auto" else kept
        return {"asked": asked, "weights": weights, "kv_cache": asked["kv_cache"], "trials": [], "note": _short(tokens)}
    choice = models.formats(with_formats(job, {**asked, "weights": kept}), prompts, shares())
    chosen = {"weights": choice.weights, "kv_cache": choice.kv_cache}
    return {"asked": asked, **chosen, "trials": [dict(trial) for trial in choice.trials], "note": choice.note}


def _short(tokens: float) -> str:
    return f"not measured: for about {tokens:,.0f} tokens to compute it does not pay (from {WORTH_TOKENS:,} on it does)"


def with_formats(job: Job, formats: Mapping[str, Any]) -> Job:
    """The job with these formats in place of what it asks for."""
    model = job.model.model_copy(update={"weights": formats["weights"]})
    engine = job.engine.model_copy(update={"kv_cache": formats["kv_cache"]})
    return job.model_copy(update={"model": model, "engine": engine})


def first_requests(source: Source, renderer: Renderer) -> Iterable[Request]:
    """Those of the first FIRST_ROWS of the input that can be asked."""
    left = FIRST_ROWS
    for batch in source.batches(columns=sorted(renderer.columns)):
        for outcome in renderer.render(batch.slice(0, left)):
            if isinstance(outcome, Request) and outcome.error is None:
                yield outcome
        left -= batch.num_rows
        if left <= 0:
            return


def describe_formats(formats: Mapping[str, Any]) -> list[str]:
    """One line for each format that was measured, and one where none could be."""
    lines = [_line(trial) for trial in formats.get("trials", ())]
    return [f"formats: {formats['note']}", *lines] if formats.get("note") else lines


def _line(trial: Mapping[str, Any]) -> str:
    verdict = "as asked" if trial["asked"] else "taken" if trial["taken"] else "refused"
    limit = f" ({trial['broken']})" if trial["broken"] else ""
    few = 1 - trial["limits"]["changed"]
    doubt = "" if trial["broken"] or trial["same_choice"] >= few else f", within a standard error of {few:.0%}"
    return (
        f"{_KINDS[trial['kind']]} {trial['format']}: {verdict}{limit}; "
        f"perplexity {trial['perplexity_rise']:+.2%}, KL {trial['divergence']:.4f} over {trial['tokens']} tokens, "
        f"same choice {trial['same_choice']:.2%} of {trial['answer_tokens']} answer tokens{doubt}, "
        f"{trial['rows']} first rows; {trial['time']:.0%} of the time"
    )
