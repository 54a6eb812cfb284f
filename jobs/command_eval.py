"""`batchgen eval`: what a number format costs in accuracy, measured on a text of the user's.

Composed from checkpoint, tokenizer, decoders and their comparison; knows no job file.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import JobError, UsageError

if TYPE_CHECKING:
    from batchgen.engine.accuracy import Accuracy

REFERENCE = "native"
WINDOW = 512  # tokens of one piece of text, where the context holds so many: each starts without context, as a row does


@dataclass(frozen=True)
class EvalOptions:
    """The formats to compare with native weights and plain KV in `reference_dtype`, and on how much text.

    `kv`: formats of the KV cache, each beside native weights in `dtype`.
    """

    weights: tuple[str, ...]
    kv: tuple[str, ...]
    dtype: str
    reference_dtype: str
    tokens: int


def evaluate(model: str, text: Path, options: EvalOptions) -> list[dict[str, Any]]:
    """One record per format. Raises ModelError for a model or format that cannot be loaded, JobError."""
    from batchgen import kernels
    from batchgen.engine.accuracy import Candidate, Trace, difference, trace
    from batchgen.engine.checkpoint import open_checkpoint
    from batchgen.engine.decoder import Decoder, load_decoder
    from batchgen.engine.device import resolve_device
    from batchgen.engine.machine import DTYPES, use_granted_cores
    from batchgen.engine.models import architecture
    from batchgen.engine.tokenizer import load_tokenizer

    use_granted_cores()
    ops, checkpoint = kernels.load("cpu"), open_checkpoint(model)
    tokenizer = load_tokenizer(model)
    window = min(WINDOW, architecture(checkpoint.config).spec(checkpoint.config).context_length)
    pieces = [piece for piece in _pieces(tokenizer, text, options.tokens, window) if len(piece) > 1]
    if not pieces:
        raise JobError(f"{text}: the texts hold no token to predict; give longer ones")

    def load(weights: str, dtype: str) -> Decoder:
        return load_decoder(checkpoint, DTYPES[dtype], resolve_device("cpu"), ops, weights)

    def seen(decoder: Decoder, kv_cache: str) -> Trace:
        found = trace(Candidate(decoder, ops, decoder.kv_shape(kv_cache)), pieces)
        return replace(found, logits=decoder.head().logits)

    decoder = load(REFERENCE, options.reference_dtype)
    vocabulary = min(tokenizer.size, decoder.spec.vocab_size)
    reference, records = seen(decoder, "auto"), []
    del decoder
    for weights, formats in _by_weights(options):
        decoder = load(weights, options.dtype)
        for kv_cache in formats:
            result = difference(reference, seen(decoder, kv_cache), pieces, vocabulary)
            told = options.dtype if kv_cache == "auto" else kv_cache
            records.append({"weights": weights, "kv_cache": told, "dtype": options.dtype, **_figures(result)})
        del decoder
    return records


def _by_weights(options: EvalOptions) -> list[tuple[str, list[str]]]:
    """Each weight format with the KV formats to try beside it, so that none is loaded twice."""
    formats = {weights: ["auto"] for weights in options.weights}
    for kv_cache in options.kv:
        beside, told = formats.setdefault(REFERENCE, []), "auto" if kv_cache == options.dtype else kv_cache
        if told not in beside:
            beside.append(told)
    return list(formats.items())


def _figures(result: "Accuracy") -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "perplexity": result.perplexity,
        "reference_perplexity": result.reference_perplexity,
        "perplexity_rise": result.perplexity_rise,
        "divergence": result.divergence,
        "agreement": result.agreement,
    }


def _pieces(tokenizer: Any, text: Path, limit: int, window: int) -> list[list[int]]:
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text}: not a readable UTF-8 text ({error})") from error
    (tokens,) = tokenizer.encode([content], add_special_tokens=False)
    tokens = tokens[:limit]
    return [tokens[start : start + window] for start in range(0, len(tokens), window)]


def describe_evaluation(records: list[dict[str, Any]], options: EvalOptions) -> str:
    """A table for people."""
    first = records[0]
    lines = [
        f"reference: {REFERENCE} weights, {options.reference_dtype}: perplexity {first['reference_perplexity']:.4f} "
        f"over {first['tokens']} tokens",
        f"{'weights':8} {'KV cache':9} {'dtype':9} {'perplexity':>10} {'rise':>8} {'KL (nat)':>9} {'same choice':>12}",
    ]
    lines += [
        f"{record['weights']:8} {record['kv_cache']:9} {record['dtype']:9} {record['perplexity']:10.4f} "
        f"{record['perplexity_rise']:+8.2%} {record['divergence']:9.5f} {record['agreement']:12.2%}"
        for record in records
    ]
    return "\n".join(lines)


def dump_evaluation(records: list[dict[str, Any]]) -> str:
    """JSON, in which a figure that is no number is null."""
    return json.dumps([{key: _number(value) for key, value in record.items()} for record in records], allow_nan=False)


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
