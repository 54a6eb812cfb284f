"""`batchgen plan`: reads and tokenises the whole input and tells what a run would have to do. Loads no weights.

Knows how to bring the figures together and into words; they are counted in analysis.py.
"""

import json
from collections.abc import Iterator
from typing import Any

from batchgen.engine.options import Chosen
from batchgen.pipeline.pieces import templates_of

from .advice import Advice, advise, in_words
from .analysis import PrefixGroup
from .choices import Situation, explain_choices, last_run, record
from .estimate import duration
from .job import Job
from .manifest import Manifest
from .models import Models
from .names import SIDECAR
from .planner import Planner
from .resolved import describe_sampling

_EXCERPT = 60
_TOO_LONG = {
    "error": "fail",
    "skip": "are skipped",
    "truncate_left": "are cut at their start",
    "truncate_right": "are cut at their end",
}


def plan_job(job: Job, models: Models | None = None, as_json: bool = False, explain: bool = False) -> Iterator[str]:
    """Lines for people, or one line of JSON. Raises JobError and errors of the pipeline.

    `explain`: also every setting that `auto` would take, beside those it was chosen among, and what steps took in the
    last run of the job.
    """
    models = models or Models()
    planner = Planner(job, models)
    planner.read()
    advice = advise(planner.written.prompt, planner.source, planner.sample)
    situation = Situation.of(planner.job, models, planner.first, planner.num_asked, measure=False)
    chosen = situation.choose()
    situation.require_room(chosen.settings)
    stored = Manifest.load(planner.job.output_path / SIDECAR / "manifest.json")
    last = last_run(stored.choices if stored else {})
    if as_json:
        figures = _figures(planner, advice, situation, chosen)
        yield json.dumps({**figures, "last_run": last}, ensure_ascii=False)
        return
    yield from _lines(planner, advice, situation, chosen, "" if explain else "; --explain has the settings")
    if explain:
        yield from explain_choices(situation, chosen, last)


def _figures(planner: Planner, advice: list[Advice], situation: Situation, chosen: Chosen) -> dict[str, Any]:
    found = planner.statistics
    return {
        "step": None if planner.job.step is None else planner.job.step.name,
        "later_steps": [step.step.name for step in planner.later if step.step is not None],
        "rows": planner.source.num_rows,
        "failing": dict(planner.errors),
        "skipped": dict(planner.skipped),
        "prompt_tokens": found.tokens,
        "distinct_prefix_tokens": found.distinct_tokens,
        "saved_tokens": found.saved_tokens,
        "saved_share": round(found.saved_share, 4),
        "longest_prompt": found.longest,
        "most_answer_tokens": planner.answer_tokens,
        "histogram": {str(1 << power): int(count) for power, count in enumerate(found.histogram) if count},
        "duplicates": {"prompts": found.duplicates, "tokens": found.duplicate_tokens},
        "context": _context(planner),
        "groups": [_group(planner, group) for group in found.groups],
        "advice": [_advice(entry, found.tokens) for entry in advice],
        "prompt_order": planner.arrangement.orders,
        "estimated_seconds": round(_seconds(planner, chosen), 1),
        "basis": _basis(situation),
        "choices": record(situation, chosen),
    }


def _context(planner: Planner) -> dict[str, Any]:
    return {
        "tokens": planner.context,
        "near_limit": planner.statistics.near_limit,
        "too_long": planner.too_long,
        "on_too_long": planner.job.prompt.on_too_long,
        "truncated": planner.renderer.truncated,
    }


def _group(planner: Planner, group: PrefixGroup) -> dict[str, Any]:
    return {
        "saved_tokens": group.saved,
        "rows": group.rows,
        "prefix_tokens": len(group.prefix),
        "excerpt": excerpt(planner.tokenizer.decode(list(group.prefix))),
    }


def _advice(entry: Advice, prompt_tokens: int) -> dict[str, Any]:
    return {
        "text": entry.text,
        "saved_share": round(entry.saved_share, 4),
        "saved_tokens": round(entry.saved_share * prompt_tokens),
        "sample_rows": entry.sample_rows,
        "templates": templates_of(entry.prompt),
    }


def _seconds(planner: Planner, chosen: Chosen) -> float:
    return chosen.predicted.seconds if planner.first else 0.0


def _basis(situation: Situation) -> str:
    return f"on this machine, at {situation.rates.basis} rates, with {situation.work.answer:.0f} tokens an answer"


def _lines(planner: Planner, advice: list[Advice], situation: Situation, chosen: Chosen, hint: str) -> Iterator[str]:
    found, failing = planner.statistics, sum(planner.errors.values())
    codes = ", ".join(f"{count} {code}" for code, count in planner.errors.most_common())
    reasons = f" ({codes})" if codes else ""
    policies = ", ".join(f"{count} by prompt.{policy}" for policy, count in planner.skipped.most_common())
    skipped = f"{planner.skipped.total()} skipped by policy{f' ({policies})' if policies else ''}"
    if planner.job.step is not None:
        yield f"{planner.job.step}: the plan is that of this step"
    yield f"rows: {planner.source.num_rows}; {failing} will fail{reasons}; {skipped}"
    yield f"prompt tokens: {found.tokens}, longest prompt {found.longest}, context {planner.context}"
    yield "prompt lengths in tokens:"
    yield from found.histogram_lines()
    saved = f"{found.saved_tokens} ({found.saved_share:.1%})"
    yield f"distinct prefix tokens: {found.distinct_tokens}; sharing saves {saved}"
    if found.duplicates:
        yield f"duplicates: {found.duplicates} prompts of {found.duplicate_tokens} tokens equal another one"
    if planner.too_long:
        outcome = _TOO_LONG[planner.job.prompt.on_too_long]
        yield f"beyond the context: {planner.too_long} prompts {outcome} (prompt.on_too_long)"
    if found.near_limit:
        yield f"near the context's end: {found.near_limit} prompts come within a tenth of it"
    yield f"largest prefix groups: {'none' if not found.groups else ''}".rstrip()
    for group in found.groups:
        text = excerpt(planner.tokenizer.decode(list(group.prefix)))
        yield f"  {group.rows} rows share {len(group.prefix)} tokens (saves {group.saved}): {text}"
    yield describe_sampling(planner.sampling, planner.origins)
    yield f"answer tokens: at most {planner.answer_tokens} (max_tokens as upper bound)"
    if planner.job.prompt.reorder:
        yield planner.arrangement.describe()
    yield from (f"advice: {line}" for line in in_words(advice, found.tokens))
    yield f"estimated time: {duration(_seconds(planner, chosen))} ({_basis(situation)}{hint})"
    for step in planner.later:
        yield f"{step.step}: its prompts depend on answers; at most {_most_tokens(step)} answer tokens a row"


def _most_tokens(job: Job) -> int:
    return job.generation.max_tokens * job.generation.n


def excerpt(text: str) -> str:
    """Start and end of a text on one line."""
    flat = json.dumps(text, ensure_ascii=False)[1:-1]
    return f'"{flat}"' if len(flat) <= 2 * _EXCERPT else f'"{flat[:_EXCERPT]} ... {flat[-_EXCERPT:]}"'
