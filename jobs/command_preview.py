"""`batchgen preview`: the first prompts and their answers, on the terminal only.

Knows how a row is shown; writes no file.
"""

from collections.abc import Generator, Iterator
from datetime import date

import pyarrow as pa

from batchgen.engine.request import Completion, Request, RowError
from batchgen.pipeline.result import ResultEncoder, answer_text
from batchgen.pipeline.rows import RowBatch, Skipped, Source
from batchgen.pipeline.source import open_source

from .check import check_chain, check_files, check_model
from .columns import result_columns
from .earlier import with_answers
from .generate import make_renderer
from .job import Job
from .models import LoadedModel, Models
from .ordering import arranged, stored_order
from .resolved import describe_sampling, resolve_sampling

Rows = list[RowBatch]


def preview_job(job: Job, count: int, models: Models | None = None) -> Iterator[str]:
    """Lines that show the first `count` rows, in each step. Raises JobError and errors of pipeline and engine."""
    models = models or Models()
    check_files(job)
    for step in job.chain:
        check_model(step, models)
    limit = min(count, job.input.limit or count)
    source = open_source(job.input.model_copy(update={"limit": limit}), job.base)
    check_chain(job, source.schema)
    engine = models.engine(job)
    rows = list(source.batches())
    for step in job.chain:
        rows = yield from _preview_step(step, models, engine, source, rows)


def _preview_step(
    job: Job, models: Models, engine: LoadedModel, source: Source, rows: Rows
) -> Generator[str, None, Rows]:
    """Shows one step, and returns what the next one reads: its rows, but for skipped ones, with their answers."""
    sampling, origins = resolve_sampling(job, models)
    whole = open_source(job.input, job.base) if job.prompt.reorder else source  # by which the order is chosen
    written, order = arranged(job, whole, stored_order(job))
    renderer = make_renderer(written, models, sampling, models.tokenizer(job), date.today().isoformat())
    outcomes = [outcome for batch in rows for outcome in renderer.render(batch)]
    requests = [outcome for outcome in outcomes if isinstance(outcome, Request)]
    completions = {completion.key: completion for completion in engine.run(requests)}
    if job.step is not None:
        yield f"=== {job.step}"
    yield describe_sampling(sampling, origins)
    if job.prompt.reorder:
        yield order.describe()
    for outcome in outcomes:
        position = outcome.position if isinstance(outcome, Skipped) else outcome.key
        yield f"--- row {position} ({source.place(position)})"
        if isinstance(outcome, Skipped):
            yield f"skipped: {outcome.reason}"
        else:
            yield from _show(outcome, completions[outcome.key], engine)
    if job.step is None or job.step.is_last:
        return []
    encoder = ResultEncoder(
        engine.tokenizer, sampling, engine.bounds.eos_ids, results=result_columns(job), parser=job.parser()
    )
    return list(_answered(rows, completions, encoder))


def _answered(rows: Rows, completions: dict[int, Completion], encoder: ResultEncoder) -> Iterator[RowBatch]:
    """Each row that was asked, as a batch of its own, with its answer beside it."""
    for batch in rows:
        for offset in range(batch.num_rows):
            row = batch.slice(offset, 1)
            if row.start in completions:
                answer = encoder.encode([completions[row.start]])
                schema = with_answers(row.columns.schema, encoder.results)
                columns = pa.RecordBatch.from_arrays([*row.columns.columns, *answer.columns[1:]], schema=schema)
                yield RowBatch(row.start, columns, row.errors)


def _show(request: Request, completion: Completion, engine: LoadedModel) -> Iterator[str]:
    if request.prompt:
        yield f"prompt ({len(request.prompt)} tokens):"
        yield "".join(engine.tokenizer.token_text(token) for token in request.prompt)
    if completion.error is not None:
        yield _failure(completion.error)
    for sample in completion.samples:
        yield f"answer ({len(sample.tokens)} tokens, {sample.finish_reason}):"
        yield answer_text(sample, request.sampling, engine.bounds.eos_ids, engine.tokenizer)
    if completion.choice_probs is not None and request.sampling.grammar is not None:
        pairs = zip(request.sampling.grammar.options, completion.choice_probs, strict=True)
        yield f"choice_probs: {', '.join(f'{text!r} {prob:.3f}' for text, prob in pairs)}"


def _failure(error: RowError) -> str:
    return f"error {error.code} ({error.stage}): {error.message}"
