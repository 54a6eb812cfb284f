"""Prompts and the answers they got, read back for training: from an output directory, or a JSONL file of pairs.

Prompts are rendered again by the job that stands beside an output; knows nothing of what is trained on them.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from batchgen.engine.request import Request
from batchgen.pipeline.flow import require_columns
from batchgen.pipeline.prompt import PromptError
from batchgen.pipeline.rows import RowBatch
from batchgen.pipeline.source import open_source

from .errors import UsageError
from .generate import make_renderer
from .job import Job, local_or_hub
from .manifest import Manifest
from .models import Models
from .ordering import arranged
from .output import SIDECAR
from .resolved import resolve_sampling

Answer = tuple[list[int], list[int]]  # prompt tokens, answer tokens

_PAIR = ("prompt", "completion")


def read_answers(data: Path, model: str, tokenizer: Any, limit: int) -> list[Answer]:
    """Up to `limit` answers in tokens of the model. Raises UsageError naming the place and the cure."""
    pairs = _of_output(data, model) if data.is_dir() else _of_file(data, tokenizer)
    found = list(islice(pairs, limit))
    if not found:
        raise UsageError(f"{data}: holds no answer")
    texts = tokenizer.encode([text for _, text in found], add_special_tokens=False)
    return [(prompt, answer) for (prompt, _), answer in zip(found, texts, strict=True)]


def _of_file(data: Path, tokenizer: Any) -> Iterator[tuple[list[int], str]]:
    try:
        lines = data.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{data}: neither an output directory nor a readable JSONL file ({error})") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt, answer = _pair(line, f"{data} line {number}")
            yield tokenizer.encode([prompt], add_special_tokens=True)[0], answer


def _pair(line: str, place: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _PAIR):
        raise UsageError(f'{place}: must be an object with texts "prompt" and "completion"')
    return row["prompt"], row["completion"]


def _of_output(data: Path, model: str) -> Iterator[tuple[list[int], str]]:
    manifest = Manifest.load(data / SIDECAR / "manifest.json")
    if manifest is None:
        raise UsageError(f"{data}: is no output of batchgen; give one, or a JSONL file")
    if not manifest.published:
        raise UsageError(f"{data}: has no finished rows yet; let the run end first")
    job = _job_over_its_output(data, model, manifest)
    source = open_source(job.input, job.base)
    models = Models()
    written, _ = arranged(job, source, manifest.prompt_order)
    sampling, _ = resolve_sampling(job, models)
    renderer = make_renderer(written, models, sampling, models.tokenizer(job), manifest.template_date)
    try:
        require_columns(renderer, source.schema)
    except PromptError as error:
        raise UsageError(f"{data}: {error}; run the job with output.columns: all, or give a JSONL file") from error
    column = f"{job.output.prefix}completion"
    for batch in source.batches(columns=sorted({*renderer.columns, column})):
        yield from _answered(batch, renderer.render(batch), column)


def _job_over_its_output(data: Path, model: str, manifest: Manifest) -> Job:
    """The stored job, with this model, reading the rows it wrote."""
    path = data / SIDECAR / "job.yaml"
    written = Job.load(path, {"generation": {}})
    if "openai" in (written.input.format, written.output.format):
        raise UsageError(f"{data}: an OpenAI batch carries no prompts along; give a JSONL file")
    if written.model.chat_template is not None and not Path(written.model.chat_template).is_absolute():
        raise UsageError(f"{data}: its job has a chat template of its own, relative to a job file; give a JSONL file")
    return Job.load(
        path,
        {
            "model": {"path": local_or_hub(model, Path.cwd()), "chat_template": written.model.chat_template},
            "input": {"path": str(data.resolve()), "format": written.output.format},
            "generation": {"max_tokens": manifest.max_tokens[-1]},
            "output": {"path": str(data.resolve()), "prefix": written.output.prefix},
            "engine": {},
            "run": {},
        },
    )


def _answered(batch: RowBatch, outcomes: list[Any], column: str) -> Iterator[tuple[list[int], str]]:
    """Of n answers to a row each counts; rows without an answer, and those no longer to be rendered, do not."""
    values = batch.columns.column(column).to_pylist()
    prompts = {outcome.key: outcome for outcome in outcomes if isinstance(outcome, Request) and outcome.error is None}
    for offset, value in enumerate(values):
        request = prompts.get(batch.start + offset)
        if request is not None and value is not None:
            for text in [value] if isinstance(value, str) else value:
                yield list(request.prompt), text
