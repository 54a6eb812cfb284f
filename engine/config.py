"""The model, generation and engine sections of a job file, checked value by value.

Knows which values are legal and which are not there yet; loads no torch, opens no file.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from .generation import resolve_generation
from .grammar import GRAMMAR_KEYS, Grammar, GrammarError, check_grammar, read_schema

PerRowKey = Literal[
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
]

_SIZE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", re.IGNORECASE)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_SMALLEST_MEMORY = 2**10  # a number between 1 and this is neither a share nor a sensible count of bytes


class Section(BaseModel):
    """A part of the job file: unknown keys, coerced types, NaN and later changes are refused.

    A validator that speaks about one key starts its message with the key and a colon.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSettings(Section):
    """Which model to run, and in which number format."""

    path: str = Field(min_length=1, description="Hub id, local directory or local .gguf file")
    revision: str | None = Field(None, description="branch, tag or commit, for a Hub id")
    tokenizer: str | None = Field(None, description="path or Hub id; default: the model's own")
    chat_template: str | None = Field(None, description="a .jinja file that replaces the model's chat template")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="number format of computation")
    weights: Literal["auto", "native", "int8", "int4", "fp8"] = Field(
        "auto",
        description="number format of weights; native: the checkpoint's values in dtype, int8 and int4: whole numbers "
        "with 8-bit activations (int4 keeps the codes of 4-bit checkpoints), fp8: 8-bit floats with activations in "
        "bfloat16, auto: the fastest that passes the accuracy gate on the job's first rows (float32: native)",
    )


class GenerationSettings(Section):
    """How answers are sampled. null: the model's generation_config.json decides, then the neutral value."""

    max_tokens: int = Field(256, description="most tokens of an answer")
    min_tokens: int = Field(0, description="fewest tokens before an answer may end")
    temperature: float | None = Field(None, description="0 is greedy; neutral: 1.0")
    top_p: float | None = Field(None, description="smallest set of tokens with this probability; neutral: 1.0")
    top_k: int | None = Field(None, description="this many most likely tokens; 0, neutral: all")
    min_p: float | None = Field(None, description="at least this share of the most likely token; neutral: 0")
    repetition_penalty: float | None = Field(None, description="on tokens of prompt and answer; neutral: 1.0")
    presence_penalty: float | None = Field(None, description="once per token of the answer; neutral: 0")
    frequency_penalty: float | None = Field(None, description="per occurrence in the answer; neutral: 0")
    n: int = Field(1, description="completions per row")
    seed: int = Field(0, description="start of all noise")
    stop: Annotated[tuple[str, ...], Field(strict=False)] = Field((), description="strings that end an answer")
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = Field((), description="tokens that end an answer")
    include_stop: bool = Field(False, description="keep the stop string in the text")
    ignore_eos: bool = Field(False, description="go on to max_tokens")
    logprobs: int | None = Field(None, description="k: log-probabilities of each token and the k most likely ones")
    choices: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        None, description="the answer is one of these texts; at most one of choices, regex, json_schema and grammar"
    )
    regex: str | None = Field(
        None, description="a regular expression that the whole answer matches (Rust syntax, no look-around)"
    )
    json_schema: dict[str, Any] | str | None = Field(
        None, description="a JSON Schema of the answer, or the path of a .json; answers are written without blanks"
    )
    grammar: str | None = Field(None, description="a Lark grammar of the answer (the dialect of llguidance)")
    per_row: dict[PerRowKey, str] = Field({}, description="{key: column}: columns that override a key per row")

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        resolve_generation(self, {})
        return self

    @field_validator("json_schema")
    @classmethod
    def _schema_is_read(cls, value: dict[str, Any] | str | None, info: ValidationInfo) -> dict[str, Any] | None:
        """The schema itself; a path is relative to the job file."""
        return read_schema(value, (info.context or {}).get("base", Path())) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _grammar_is_good(self) -> Self:
        given = [name for name in GRAMMAR_KEYS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: cannot stand beside {given[0]}, keep one of them")
        try:
            if self.structure is not None:
                check_grammar(self.structure)
        except GrammarError as error:
            raise ValueError(f"{given[0]}: {error}") from error
        return self

    @property
    def structure(self) -> Grammar | None:
        """What every answer must match, whichever key says it. Raises GrammarError for what cannot be written down."""
        if self.choices is not None:
            return Grammar.choices(self.choices)
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.json_schema is not None:
            assert isinstance(self.json_schema, dict)
            return Grammar.json_schema(self.json_schema)
        return None if self.grammar is None else Grammar.lark(self.grammar)


class DraftSpeculation(Section):
    """A smaller model with the same tokenizer drafts tokens."""

    kind: Literal["draft"]
    model: str = Field(
        min_length=1, description="Hub id, local directory or .gguf; self: an INT4 copy of the model that is run"
    )
    tokens: int = Field(4, ge=1, le=32, description="longest draft")


class MedusaSpeculation(Section):
    """Extra heads draft tokens."""

    kind: Literal["medusa"]
    path: str


class EngineSettings(Section):
    """How the machine is used. Nothing here changes what the answers are meant to be."""

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    memory: Literal["auto"] | int | float | str = Field(
        "auto", description='KV cache: auto, bytes ("8GiB"), or a share of what is free (0.9)'
    )
    kv_cache: Literal["auto", "float32", "bfloat16", "fp8", "int8", "int4"] = Field(
        "auto",
        description="number format of keys and values; fp8, int8, int4: scaled per token and head, auto: model.dtype",
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV block")
    max_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field("auto", description="tokens fed per step")
    max_sequences: Annotated[int, Field(ge=1)] | Literal["auto"] = Field("auto", description="rows computed at once")
    prefix_sharing: bool = Field(True, description="compute a prefix that rows share once")
    speculation: Literal["auto", "off", "ngram", "suffix", "layer_skip"] | DraftSpeculation | MedusaSpeculation = Field(
        "auto",
        description="guesses at several tokens per step, which change no answer; off; ngram: from the row's own text; "
        "suffix: also from finished answers; auto: suffix, as far as measured step times say it pays; "
        "layer_skip: from the model's first layers; {kind: draft, model: PATH, tokens: 4}: from a smaller model",
    )

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:N, got {value!r}")
        return value

    @field_validator("memory")
    @classmethod
    def _memory_is_a_size(cls, value: int | float | str) -> int | float | str:
        parse_memory(value)
        return value

    @property
    def speculation_kind(self) -> str:
        """Its name in the table of `engine/draft/table.py`."""
        return self.speculation if isinstance(self.speculation, str) else self.speculation.kind

    @field_validator("speculation")
    @classmethod
    def _speculation_exists(cls, value: Any) -> Any:
        kind = value if isinstance(value, str) else value.kind
        _refuse_later(kind, ("medusa",), "use auto, off, ngram, suffix, layer_skip or draft")
        return value


def parse_memory(value: int | float | str) -> int | float | None:
    """Bytes (int) or a share of the free memory (float in (0, 1]); None for "auto". Raises ValueError."""
    if value == "auto":
        return None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(f'must be auto, a size like "8GiB" or a share like 0.9, got {value!r}')
        return _bytes(int(float(match[1]) * _SIZE_UNITS[(match[2] or "").upper()]), value)
    if 0 < value <= 1:
        return float(value)
    return _bytes(int(value), value)


def _bytes(count: int, written: object) -> int:
    if count < _SMALLEST_MEMORY:
        raise ValueError(f'must be auto, a size like "8GiB" or a share between 0 and 1, got {written!r}')
    return count


def _refuse_later(value: str, later: tuple[str, ...], cure: str) -> str:
    if value in later:
        raise ValueError(f"{value} is not available yet, {cure}")
    return value
