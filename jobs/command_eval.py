"""`batchgen eval`: what a number format costs in accuracy, measured on a user's text and the first rows of a job.

Composed from checkpoint, tokenizer, decoders and their comparison; which formats a run takes is decided elsewhere.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.pipeline.source import open_source

from .check import check_chain, check_files, check_model
from .errors import JobError, UsageError
from .formats import first_requests
from .generate import make_renderer
from .job import Job
from .models import Models
from .ordering import arranged, stored_order
from .resolved import resolve_sampling

if TYPE_CHECKING:
    from batchgen.engine.gate import Measured, Texts

REFERENCE = "native"
WINDOW = 512  # tokens of one piece of text, where the context holds so many: each starts without context, as a row does


@dataclass(frozen=True)
class EvalOptions:
    """The formats to compare with native weights and plain KV in `reference_dtype`, and on how much text.

    `kv`: formats of the KV cache, each beside native weights in `dtype`. `job`: whose first rows are answered.
    """

    weights: tuple[str, ...]
    kv: tuple[str, ...]
    dtype: str
    reference_dtype: str
    tokens: int
    job: Path | None = None


def evaluate(model: str, text: Path, options: EvalOptions) -> list[dict[str, Any]]:
    """One record per format. Raises ModelError for a model or format that cannot be loaded, JobError, UsageError."""
    from batchgen import kernels
    from batchgen.engine.accuracy import Candidate, Trace, trace
    from batchgen.engine.checkpoint import open_checkpoint
    from batchgen.engine.choose import answered
    from batchgen.engine.decoder import Decoder, load_decoder
    from batchgen.engine.device import resolve_device
    from batchgen.engine.gate import Texts
    from batchgen.engine.machine import DTYPES, use_granted_cores
    from batchgen.engine.models import architecture
    from batchgen.engine.tokenizer import load_tokenizer

    use_granted_cores()
    ops, checkpoint = kernels.load("cpu"), open_checkpoint(model)
    tokenizer, spec = load_tokenizer(model), architecture(checkpoint.config).spec(checkpoint.config)
    pieces = _pieces(tokenizer, text, options.tokens, min(WINDOW, spec.context_length))
    prompts = [] if options.job is None else _first_prompts(options.job, model)

    def load(weights: str, dtype: str) -> Decoder:
        return load_decoder(checkpoint, DTYPES[dtype], resolve_device("cpu"), ops, weights)

    def seen(decoder: Decoder, kv_cache: str, texts: list[Texts]) -> list[Trace]:
        candidate = Candidate(decoder, ops, decoder.kv_shape(kv_cache))
        return [replace(trace(candidate, one.tokens), logits=decoder.head().logits) for one in texts]

    decoder = load(REFERENCE, options.reference_dtype)
    vocabulary = min(tokenizer.size, decoder.spec.vocab_size)
    measured_on = [Texts(pieces, (0,) * len(pieces), vocabulary)]
    if options.job is not None:
        measured_on.append(_required(answered(decoder, checkpoint, tokenizer, ops, prompts), options.job))
    references, records = seen(decoder, "auto", measured_on), []
    del decoder
    for weights, formats in _by_weights(options):
        decoder = load(weights, options.dtype)
        for kv_cache in formats:
            found = zip(measured_on, references, seen(decoder, kv_cache, measured_on), strict=True)
            told = options.dtype if kv_cache == "auto" else kv_cache
            format_names = {"weights": weights, "kv_cache": told, "dtype": options.dtype}
            records.append({**format_names, **_figures(*(texts.compare(*traces) for texts, *traces in found))})
        del decoder
    return records


def _first_prompts(path: Path, model: str) -> list[Sequence[int]]:
    """Token ids of the first rows of a job's first step, as this model would be given them."""
    local = Path(model).expanduser()
    job = Job.load(path, {"model.path": str(local.resolve()) if local.exists() else model})
    models = Models()
    check_files(job)
    step = job.chain[0]
    check_model(step, models)
    source = open_source(job.input, job.base)
    check_chain(job, source.schema)
    sampling, _ = resolve_sampling(step, models)
    written, _ = arranged(step, source, stored_order(step))
    renderer = make_renderer(written, models, sampling, models.tokenizer(step), date.today().isoformat())
    return [request.prompt for request in first_requests(source, renderer)]


def _required(texts: "Texts | None", job: Path) -> "Texts":
    if texts is None:
        raise JobError(f"{job}: none of its first rows has an answer to measure on")
    return texts


def _by_weights(options: EvalOptions) -> list[tuple[str, list[str]]]:
    """Each weight format with the KV formats to try beside it, so that none is loaded twice."""
    formats = {weights: ["auto"] for weights in options.weights}
    for kv_cache in options.kv:
        beside, told = formats.setdefault(REFERENCE, []), "auto" if kv_cache == options.dtype else kv_cache
        if told not in beside:
            beside.append(told)
    return list(formats.items())


def _figures(text: "Measured", rows: "Measured | None" = None) -> dict[str, Any]:
    whole = text.all
    figures = {
        "tokens": whole.tokens,
        "perplexity": whole.perplexity,
        "reference_perplexity": whole.reference_perplexity,
        "perplexity_rise": whole.perplexity_rise,
        "divergence": whole.divergence,
        "agreement": whole.agreement,
    }
    if rows is None:
        return figures
    return {**figures, "job_answer_tokens": rows.answers.tokens, "job_agreement": rows.answers.agreement}


def _pieces(tokenizer: Any, text: Path, limit: int, window: int) -> tuple[tuple[int, ...], ...]:
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text}: not a readable UTF-8 text ({error})") from error
    (tokens,) = tokenizer.encode([content], add_special_tokens=False)
    cut = (tuple(tokens[start : min(start + window, limit)]) for start in range(0, min(limit, len(tokens)), window))
    pieces = tuple(piece for piece in cut if len(piece) > 1)
    if not pieces:
        raise JobError(f"{text}: the texts hold no token to predict; give longer ones")
    return pieces


def describe_evaluation(records: list[dict[str, Any]], options: EvalOptions) -> str:
    """A table for people."""
    first = records[0]
    reference = f"{REFERENCE} weights, {options.reference_dtype}"
    over = f"perplexity {first['reference_perplexity']:.4f} over {first['tokens']} tokens"
    heading = (
        f"{'weights':8} {'KV cache':9} {'dtype':9} {'perplexity':>10} {'rise':>8} {'KL (nat)':>9} {'same choice':>12}"
    )
    if options.job is not None:
        over = f"{over}; {first['job_answer_tokens']} answer tokens of {options.job}"
        heading = f"{heading} {'of the job':>11}"
    return "\n".join([f"reference: {reference}: {over}", heading, *map(_line, records)])


def _line(record: dict[str, Any]) -> str:
    of_job = f" {record['job_agreement']:11.2%}" if "job_agreement" in record else ""
    return (
        f"{record['weights']:8} {record['kv_cache']:9} {record['dtype']:9} {record['perplexity']:10.4f} "
        f"{record['perplexity_rise']:+8.2%} {record['divergence']:9.5f} {record['agreement']:12.2%}{of_job}"
    )


def dump_evaluation(records: list[dict[str, Any]]) -> str:
    """JSON, in which a figure that is no number is null."""
    return json.dumps([{key: _number(value) for key, value in record.items()} for record in records], allow_nan=False)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
