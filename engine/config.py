"""The model, generation and engine sections of a job file, checked value by value.

Knows which values are legal; loads no torch, opens no file but a JSON Schema.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from .generation import resolve_generation
from .grammar import GRAMMAR_KEYS, Grammar, GrammarError, check_grammar, read_schema
from .request import POSITIVE, RANGES

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
BLOCK_SIZE = 16
ADOPTED = "max_batch_tokens", "max_sequences", "speculation"  # settings that an engine can change between runs
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
SELF = "self"  # as the path of a draft model: the model that is run, its weights in INT4
HEADS_FILES = "medusa_lm_head.safetensors", "medusa_lm_head.pt"  # one of them holds Medusa heads
_SMALLEST_MEMORY = 2**10  # a number between 1 and this is neither a share nor a sensible count of bytes


class Section(BaseModel):
    """A part of the job file: unknown keys, coerced types, NaN and later changes are refused.

    A validator that speaks about one key starts its message with the key and a colon.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSettings(Section):
    """Which model to run, and in which number format."""

    path: str = Field(min_length=1, description="Hub id, local directory or local .gguf file")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub id")
    tokenizer: str | None = Field(None, description="local path or Hub id of another tokenizer; null: the model's own")
    chat_template: str | None = Field(None, description="a .jinja file that replaces the model's chat template")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number format of computation; auto: float32 for a float32 checkpoint, else bfloat16, and float32 "
        "where the processor has no bfloat16",
    )
    weights: Literal["auto", "native", "int8", "int4", "fp8"] = Field(
        "auto",
        description="number format of weights; native: the checkpoint's values in dtype, int8 and int4: whole numbers "
        "with 8-bit activations (int4 keeps the codes of 4-bit checkpoints), fp8: 8-bit floats with activations in "
        "bfloat16, auto: the fastest that passes the accuracy gate on the job's first rows (float32: native)",
    )


def _with_ranges(schema: dict[str, Any]) -> None:
    """For editors and the reference: the numbers that `Sampling` takes."""
    for name, (low, high) in RANGES.items():
        least = "exclusiveMinimum" if name in POSITIVE else "minimum"
        schema["properties"][name] |= {least: low, "maximum": high}


class GenerationSettings(Section):
    """How answers are sampled. null: the model's generation_config.json decides, then the neutral value."""

    model_config = ConfigDict(json_schema_extra=_with_ranges)

    max_tokens: int = Field(256, description="most tokens of an answer; must leave room for a prompt in the context")
    min_tokens: int = Field(
        0, description="an answer does not end before it has this many tokens, unless its grammar lets nothing follow"
    )
    temperature: float | None = Field(None, description="0 is greedy; neutral: 1.0")
    top_p: float | None = Field(
        None, description="draw from the smallest set of tokens with this probability; neutral: 1.0"
    )
    top_k: int | None = Field(None, description="draw from this many most likely tokens; neutral: 0, all")
    min_p: float | None = Field(None, description="least share of the most likely token's probability; neutral: 0")
    repetition_penalty: float | None = Field(
        None, description="on tokens of prompt and answer, once each; neutral: 1.0"
    )
    presence_penalty: float | None = Field(None, description="once per token of the answer; neutral: 0")
    frequency_penalty: float | None = Field(None, description="per occurrence in the answer; neutral: 0")
    n: int = Field(1, description="answers per row; above 1 the result columns hold lists")
    seed: int = Field(0, description="with it the noise of a token depends on row, sample and token position alone")
    stop: Annotated[tuple[str, ...], Field(strict=False)] = Field((), description="strings that end an answer")
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = Field((), description="tokens that end an answer")
    include_stop: bool = Field(False, description="keep the stop string in the text")
    ignore_eos: bool = Field(False, description="end tokens of the model do not end an answer")
    logprobs: int | None = Field(
        None, description="k: a column with the log-probability of each token and of the k most likely ones; 0 is legal"
    )
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


FeedPolicy = Annotated[
    Literal["always", "auto"],
    Field(
        description="how much of its drafts is fed; always: all; auto: as far as it pays by measured acceptance and "
        "times, that of drafting included"
    ),
]


class DraftSpeculation(Section):
    """A smaller model with the same tokenizer drafts tokens."""

    kind: Literal["draft"] = Field(description="a model of its own")
    model: str = Field(
        min_length=1, description="Hub id, local directory or .gguf; self: an INT4 copy of the model that is run"
    )
    tokens: int = Field(4, ge=1, le=32, description="longest draft")
    policy: FeedPolicy = "always"


class MedusaSpeculation(Section):
    """Heads over the model's last hidden state draft one token each."""

    kind: Literal["medusa"] = Field(description="a name of its own, with heads trained for the model")
    path: str = Field(min_length=1, description="directory or Hub id of Medusa heads, as `batchgen heads` writes them")
    policy: FeedPolicy = "always"


class PredictionSpeculation(Section):
    """The layer that a checkpoint ships to predict a further token (multi-token prediction)."""

    kind: Literal["mtp"] = Field(description="a layer of the checkpoint itself; MiMo has one")
    tokens: int = Field(
        1, ge=1, le=8, description="longest draft; beyond the first token the layer reads its own state"
    )
    policy: FeedPolicy = "always"


Speculations = DraftSpeculation | MedusaSpeculation | PredictionSpeculation


class EngineSettings(Section):
    """How the machine is used. Nothing here changes what the answers are meant to be."""

    device: str = Field(
        "auto",
        description="auto, cpu, cuda or cuda:N; auto: the first usable CUDA device, else the CPU; a named one is used, "
        "or refused with the reason",
    )
    memory: Literal["auto"] | int | float | str = Field(
        "auto",
        description='KV cache: bytes ("8GiB"), or a share of the free memory (0.9), on a GPU of what weights and the '
        "largest step leave; auto: a quarter, 4 GiB at most, on a GPU 0.9",
    )
    kv_cache: Literal["auto", "float32", "bfloat16", "fp8", "int8", "int4"] = Field(
        "auto",
        description="number format of keys and values; fp8, int8, int4: scaled per token and head, auto: the "
        "fastest that passes the accuracy gate on the job's first rows (float32: float32)",
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        BLOCK_SIZE, description="tokens per block of keys and values; auto: the cost model's choice, 16 without a job"
    )
    max_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="most tokens fed in one step; auto: the smallest that costs no speed, by the job's first rows and "
        "the rates of the machine; without a job: 512, on a GPU 8192",
    )
    max_sequences: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="most answers under way at once; auto: as max_batch_tokens; without a job: 256, on a GPU 1024",
    )
    prefix_sharing: bool = Field(True, description="compute a prefix that rows share once; false is for measurements")
    speculation: Literal["auto", "off", "ngram", "suffix", "layer_skip"] | Speculations = Field(
        "auto",
        description="guesses at several tokens per step, which change no answer; off; ngram: from the row's own text; "
        "suffix: also from finished answers; auto: suffix, as far as measured step times say it pays; "
        "layer_skip: from the model's first layers; {kind: draft, model: PATH, tokens: 4}: from a smaller model; "
        "{kind: medusa, path: PATH}: from heads trained for the model (batchgen heads); "
        "{kind: mtp}: from the layer for it that the checkpoint ships",
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
    def tokens_per_block(self) -> int:
        """block_size with auto resolved."""
        return BLOCK_SIZE if self.block_size == "auto" else self.block_size

    @property
    def speculation_kind(self) -> str:
        """Its name in the table of `engine/draft/table.py`."""
        return self.speculation if isinstance(self.speculation, str) else self.speculation.kind

    @property
    def speculation_policy(self) -> str:
        """The name of the policy in the same table; drafters that are nothing but a name are fed whole."""
        if isinstance(self.speculation, str):
            return "auto" if self.speculation == "auto" else "always"
        return self.speculation.policy


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
