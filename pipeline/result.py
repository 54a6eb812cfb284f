"""The result columns of a row: their fixed schema, and completions turned into them.

Knows tokens, text and Arrow; files are not known here.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from batchgen.engine.request import Completion, RowError, Sample, Sampling, TokenLogprob

from .rows import RowTag

RESULT_COLUMNS = ("completion", "finish_reason", "usage", "error")

_USAGE = pa.struct([("prompt_tokens", pa.int32()), ("cached_tokens", pa.int32()), ("completion_tokens", pa.int32())])
_ERROR = pa.struct([("code", pa.string()), ("stage", pa.string()), ("message", pa.string()), ("retryable", pa.bool_())])
_TOKEN = [("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())]
_LOGPROBS = pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))


class ResultTokenizer(Protocol):
    """The part of a tokenizer that results need."""

    def decode(self, tokens: Sequence[int]) -> str: ...
    def token_text(self, token: int) -> str: ...


def result_schema(n: int, logprobs: bool, prefix: str = "") -> pa.Schema:
    """The result columns of a job, the same whatever its rows turn out to be."""
    many = n > 1
    fields = [
        ("completion", pa.list_(pa.string()) if many else pa.string()),
        ("finish_reason", pa.list_(pa.string()) if many else pa.string()),
        ("usage", _USAGE),
        ("error", _ERROR),
    ]
    if logprobs:
        fields.append(("logprobs", pa.list_(_LOGPROBS) if many else _LOGPROBS))
    return pa.schema([(prefix + name, kind) for name, kind in fields])


class ResultEncoder:
    """Turns completions into record batches of `schema`: `position` (int64) and the result columns.

    `eos_ids` are the end tokens of model and tokenizer; `base` is the sampling of the job, and `results` are the
    result columns (default: what that sampling needs).
    """

    def __init__(
        self,
        tokenizer: ResultTokenizer,
        base: Sampling,
        eos_ids: frozenset[int],
        prefix: str = "",
        results: pa.Schema | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._base = base
        self._eos_ids = eos_ids
        self.results = result_schema(base.n, base.logprobs is not None, prefix) if results is None else results
        self._has_lists = pa.types.is_list(self.results.field(0).type)
        self._has_logprobs = len(self.results) > len(RESULT_COLUMNS)
        self.schema = pa.schema([pa.field("position", pa.int64()), *self.results])

    def encode(self, completions: Sequence[Completion]) -> pa.RecordBatch:
        """One row per completion, in their order."""
        rows = [self._row(completion) for completion in completions]
        columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(self.schema)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _row(self, completion: Completion) -> list[Any]:
        sampling = completion.tag.sampling if isinstance(completion.tag, RowTag) else self._base
        usage = completion.usage
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        answers = [] if completion.error is not None else list(completion.samples)
        texts = [answer_text(sample, sampling, self._eos_ids, self._tokenizer) for sample in answers]
        reasons: list[str] = [sample.finish_reason for sample in answers] or ["error"]
        row = [completion.key, self._shape(texts), self._shape(reasons), counts, _error(completion.error)]
        if self._has_logprobs:
            row.append(self._shape([self._logprobs(sample.logprobs) for sample in answers]))
        return row

    def _shape(self, values: list[Any]) -> Any:
        """A list when the columns hold several samples, else the only value; null without one."""
        if self._has_lists:
            return values or None
        return values[0] if values else None

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> list[dict[str, Any]] | None:
        if logprobs is None:
            return None
        return [
            {**self._token(entry.token_id, entry.logprob), "top": [self._token(*pair) for pair in entry.top]}
            for entry in logprobs
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "token": self._tokenizer.token_text(token), "logprob": logprob}


def answer_text(sample: Sample, sampling: Sampling, eos_ids: frozenset[int], tokenizer: ResultTokenizer) -> str:
    """The text of an answer: without the token that ended it, cut at the stop string that is complete first.

    A stop string that is complete within the first `min_tokens` tokens does not end the answer and is not looked for.
    """
    tokens = sample.tokens
    ends = set(sampling.stop_token_ids) if sampling.ignore_eos else eos_ids.union(sampling.stop_token_ids)
    if sample.finish_reason == "stop" and tokens and tokens[-1] in ends:
        tokens = tokens[:-1]
    text = tokenizer.decode(tokens)
    if not sampling.stop:
        return text
    ignored = tokenizer.decode(tokens[: sampling.min_tokens]) if sampling.min_tokens else ""
    return cut_at_stop(text, sampling.stop, sampling.include_stop, len(ignored.rstrip("\ufffd")))


def cut_at_stop(text: str, stops: Sequence[str], include: bool, ignored: int = 0) -> str:
    """The text up to the stop string whose last character comes first, after the first `ignored` characters."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, ignored - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start))
    if not found:
        return text
    end, start = min(found)
    return text[: end if include else start]


def failed_rows(errors: Sequence[RowError], results: pa.Schema) -> pa.RecordBatch:
    """Result columns of rows that have no answer, one for each error."""
    many = pa.types.is_list(results.field(0).type)
    row = [None, ["error"] if many else "error", dict.fromkeys(_USAGE.names, 0)]
    columns = [
        *(pa.array([value] * len(errors), results.field(at).type) for at, value in enumerate(row)),
        pa.array([_error(error) for error in errors], _ERROR),
        *(pa.nulls(len(errors), field.type) for field in list(results)[4:]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=results)


def _error(error: RowError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {"code": error.code, "stage": error.stage, "message": error.message, "retryable": error.retryable}
