"""`batchgen preview`: the first prompts and their answers, on the terminal only.

Knows how a row is shown; writes no file.
"""

from collections.abc import Iterator
from datetime import date

from batchgen.engine.request import Completion, Request, RowError
from batchgen.pipeline.result import answer_text
from batchgen.pipeline.rows import Skipped
from batchgen.pipeline.source import open_source

from .check import check_columns, check_files, check_model
from .generate import make_renderer
from .job import Job
from .models import LoadedModel, Models
from .ordering import arranged, stored_order
from .resolved import describe_sampling, resolve_sampling


def preview_job(job: Job, count: int, models: Models | None = None) -> Iterator[str]:
    """Lines that show the first `count` rows. Raises JobError and errors of pipeline and engine."""
    models = models or Models()
    check_files(job)
    check_model(job, models)
    limit = min(count, job.input.limit or count)
    source = open_source(job.input.model_copy(update={"limit": limit}), job.base)
    check_columns(job, source.schema)
    sampling, origins = resolve_sampling(job, models)
    whole = open_source(job.input, job.base) if job.prompt.reorder else source  # by which the order is chosen
    written, order = arranged(job, whole, stored_order(job))
    renderer = make_renderer(written, models, sampling, models.tokenizer(job), date.today().isoformat())
    engine = models.engine(job)
    outcomes = [outcome for batch in source.batches() for outcome in renderer.render(batch)]
    requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
    completions = {completion.key: completion for completion in engine.run(requests)}
    yield describe_sampling(sampling, origins)
    if job.prompt.reorder:
        yield order.describe()
    for position, outcome in enumerate(outcomes):
        yield f"--- row {position} ({source.place(position)})"
        if isinstance(outcome, Skipped):
            yield f"skipped: {outcome.reason}"
        else:
            yield from _show(outcome, completions[outcome.key], engine)


def _show(request: Request, completion: Completion, engine: LoadedModel) -> Iterator[str]:
    if request.prompt:
        yield f"prompt ({len(request.prompt)} tokens):"
        yield "".join(engine.tokenizer.token_text(token) for token in request.prompt)
    if completion.error is not None:
        yield _failure(completion.error)
    for sample in completion.samples:
        yield f"answer ({len(sample.tokens)} tokens, {sample.finish_reason}):"
        yield answer_text(sample, request.sampling, engine.bounds.eos_ids, engine.tokenizer)


def _failure(error: RowError) -> str:
    return f"error {error.code} ({error.stage}): {error.message}"
