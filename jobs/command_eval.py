"""`batchgen eval`: what a number format costs in accuracy, measured on a text of the user's.

Composed from checkpoint, tokenizer, decoders and their comparison; knows no job file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import JobError, UsageError

REFERENCE = "native"
WINDOW = 512  # tokens of one piece of text: each starts without context, as a row does


@dataclass(frozen=True)
class EvalOptions:
    """The formats to compare with native weights in `reference_dtype`, and on how much text."""

    weights: tuple[str, ...]
    dtype: str
    reference_dtype: str
    tokens: int


def evaluate(model: str, text: Path, options: EvalOptions) -> list[dict[str, Any]]:
    """One record per weight format. Raises ModelError for a model or format that cannot be loaded, JobError."""
    import torch

    from batchgen import kernels
    from batchgen.engine.accuracy import Candidate, compare
    from batchgen.engine.checkpoint import open_checkpoint
    from batchgen.engine.decoder import load_decoder
    from batchgen.engine.machine import DTYPES, use_granted_cores
    from batchgen.engine.models import architecture
    from batchgen.engine.tokenizer import load_tokenizer

    use_granted_cores()
    ops = kernels.load("cpu")
    tokenizer = load_tokenizer(model)
    pieces = _pieces(tokenizer, text, options.tokens)
    checkpoint = open_checkpoint(model)

    def load(weights: str, dtype: str) -> Candidate:
        decoder = load_decoder(checkpoint, DTYPES[dtype], torch.device("cpu"), ops, weights)
        return Candidate(decoder, ops, decoder.kv_shape())

    reference = load(REFERENCE, options.reference_dtype)
    vocabulary = min(tokenizer.size, architecture(checkpoint.config).spec(checkpoint.config).vocab_size)
    records = []
    for weights in options.weights:
        try:
            result = compare(reference, load(weights, options.dtype), pieces, vocabulary)
        except ValueError as error:
            raise JobError(f"{text}: {error}") from error
        figures = {
            "tokens": result.tokens,
            "perplexity": result.perplexity,
            "reference_perplexity": result.reference_perplexity,
            "perplexity_rise": result.perplexity_rise,
            "divergence": result.divergence,
            "agreement": result.agreement,
        }
        records.append({"weights": weights, "dtype": options.dtype, **figures})
    return records


def _pieces(tokenizer: Any, text: Path, limit: int) -> list[list[int]]:
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text}: not a readable UTF-8 text ({error})") from error
    (tokens,) = tokenizer.encode([content], add_special_tokens=False)
    tokens = tokens[:limit]
    return [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]


def describe_evaluation(records: list[dict[str, Any]], options: EvalOptions) -> str:
    """A table for people."""
    first = records[0]
    lines = [
        f"reference: {REFERENCE} weights, {options.reference_dtype}: perplexity {first['reference_perplexity']:.4f} "
        f"over {first['tokens']} tokens",
        f"{'weights':8} {'dtype':9} {'perplexity':>10} {'rise':>8} {'KL (nat)':>9} {'same choice':>12}",
    ]
    lines += [
        f"{record['weights']:8} {record['dtype']:9} {record['perplexity']:10.4f} {record['perplexity_rise']:+8.2%} "
        f"{record['divergence']:9.5f} {record['agreement']:12.2%}"
        for record in records
    ]
    return "\n".join(lines)


def dump_evaluation(records: list[dict[str, Any]]) -> str:
    return json.dumps(records)
