"""The result columns of a row: their fixed schema, and completions turned into them.

Knows tokens, text and Arrow; files are not known here.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from batchgen.engine.request import Completion, RowError, Sample, Sampling, TokenLogprob

from .parsed import AnswerParser, ParseError
from .rows import RowTag

RESULT_COLUMNS = ("completion", "finish_reason", "usage", "error")

_USAGE = pa.struct([("prompt_tokens", pa.int32()), ("cached_tokens", pa.int32()), ("completion_tokens", pa.int32())])
_ERROR = pa.struct([("code", pa.string()), ("stage", pa.string()), ("message", pa.string()), ("retryable", pa.bool_())])
_TOKEN = [("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())]
_CHOICE_PROBS = pa.list_(pa.struct([("choice", pa.string()), ("prob", pa.float32())]))
Columns = Sequence[tuple[str, pa.DataType]]
_LOGPROBS = pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))


class ResultTokenizer(Protocol):
    """The part of a tokenizer that results need."""

    def decode(self, tokens: Sequence[int]) -> str: ...
    def token_text(self, token: int) -> str: ...


def result_schema(n: int, logprobs: bool, prefix: str = "", more: Columns = ()) -> pa.Schema:
    """The result columns of a job, the same whatever its rows turn out to be; `more` stand behind the usual ones."""
    many = n > 1
    fields = [
        ("completion", pa.list_(pa.string()) if many else pa.string()),
        ("finish_reason", pa.list_(pa.string()) if many else pa.string()),
        ("usage", _USAGE),
        ("error", _ERROR),
    ]
    if logprobs:
        fields.append(("logprobs", pa.list_(_LOGPROBS) if many else _LOGPROBS))
    return pa.schema([(prefix + name, kind) for name, kind in [*fields, *more]])


def further_columns(n: int, parser: AnswerParser | None, choice_probs: bool, attempts: bool) -> Columns:
    """The columns that only some jobs have."""
    found: list[tuple[str, pa.DataType]] = []
    if parser is not None:
        found.append(("parsed", pa.list_(parser.type) if n > 1 else parser.type))
    if choice_probs:
        found.append(("choice_probs", _CHOICE_PROBS))
    if attempts:
        found.append(("attempts", pa.int32()))
    return found


class ResultEncoder:
    """Turns completions into record batches of `schema`: `position` (int64) and the result columns.

    `eos_ids` are the end tokens of model and tokenizer; `base` is the sampling of the job, and `results` are the
    result columns (default: what that sampling needs). `parser` reads the answers of a `parsed` column: one that it
    cannot read keeps its text, and is an error `parse` of the row.
    """

    def __init__(
        self,
        tokenizer: ResultTokenizer,
        base: Sampling,
        eos_ids: frozenset[int],
        prefix: str = "",
        results: pa.Schema | None = None,
        parser: AnswerParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._base = base
        self._eos_ids = eos_ids
        self.results = result_schema(base.n, base.logprobs is not None, prefix) if results is None else results
        self._has_lists = pa.types.is_list(self.results.field(0).type)
        self._parser = parser
        prefix_length = len(self.results.names[0]) - len(RESULT_COLUMNS[0])
        self._further = [name[prefix_length:] for name in self.results.names[len(RESULT_COLUMNS) :]]
        self.schema = pa.schema([pa.field("position", pa.int64()), *self.results])

    def encode(self, completions: Sequence[Completion]) -> pa.RecordBatch:
        """One row per completion, in their order."""
        rows = [self._row(completion) for completion in completions]
        columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(self.schema)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def is_whole(self, completion: Completion) -> bool:
        """No answer was cut, and each one can be parsed where that is asked for."""
        return self._row(completion)[2] in ("stop", ["stop"] * len(completion.samples))

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
        parsed, error = self._parsed(texts, reasons, completion.error)
        values = {
            "logprobs": self._shape([self._logprobs(sample.logprobs) for sample in answers]),
            "parsed": self._shape(parsed),
            "choice_probs": _choice_probs(completion.choice_probs, sampling),
            "attempts": completion.attempts,
        }
        row = [completion.key, self._shape(texts), self._shape(reasons), counts, _error(error)]
        return [*row, *(values[name] for name in self._further)]

    def _parsed(
        self, texts: list[str], reasons: list[str], error: RowError | None
    ) -> tuple[list[Any], RowError | None]:
        """Values of the answers, and the row's error. A whole answer that is no value ends its reason with `error`."""
        parser = self._parser
        if parser is None:
            return [], error
        values: list[Any] = []
        for at, text in enumerate(texts):
            try:
                values.append(parser.parse(text))
            except ParseError as fault:
                values.append(None)
                reasons[at] = "length" if reasons[at] == "length" else "error"
                error = error or RowError("parse", "output", f"the answer cannot be parsed: {fault}", retryable=True)
        return values, error

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


def _choice_probs(values: Sequence[float] | None, sampling: Sampling) -> list[dict[str, Any]] | None:
    if values is None or sampling.grammar is None:
        return None
    return [{"choice": text, "prob": prob} for text, prob in zip(sampling.grammar.options, values, strict=True)]


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
