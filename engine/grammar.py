"""What an answer may look like: a description that compares and hashes, and whether it can be honoured at all.

Knows the four kinds of grammar and turns each into the source `llguidance` reads; tokens and models are not known here.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from .grammar_schema import check_schema

GrammarKind = Literal["choices", "regex", "json_schema", "grammar"]
GRAMMAR_KEYS: tuple[GrammarKind, ...] = get_args(GrammarKind)

LIMITS = LLParserLimits(verbose_errors=False)  # fuel, states and symbols a grammar may take: llguidance's own bounds
MAX_BYTES = 4 * 2**20  # of a grammar's text
MAX_CHOICES = 10_000


class GrammarError(ValueError):
    """The grammar cannot be honoured: one line."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What every answer must match. Made by the method of its kind; `text` is JSON, a regex or a Lark grammar."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise GrammarError(f"must be text, got {self.text!r:.100}")

    @classmethod
    def choices(cls, choices: Sequence[str]) -> Self:
        """The answer is one of some different, non-empty texts."""
        return cls("choices", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """The whole answer matches a regular expression (Rust syntax, no look-around)."""
        return cls("regex", pattern)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Self:
        """The answer is JSON of this schema, compact unless its `x-guidance` key says otherwise; properties in order.

        Raises GrammarError for what is no JSON.
        """
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"is not JSON: {error}") from error

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """The answer is in the language of a Lark grammar (llguidance's dialect)."""
        return cls("grammar", grammar)

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.text)} characters"

    @property
    def options(self) -> tuple[str, ...]:
        """The texts of a grammar of choices. Raises GrammarError when that is not what it holds."""
        found = _parsed(self.text)
        if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
            raise GrammarError(f"must be a list of non-empty texts, got {self.text:.100}")
        if len(found) > MAX_CHOICES:
            raise GrammarError(f"{len(found)} choices are more than {MAX_CHOICES}")
        repeated = [text for text, count in Counter(found).items() if count > 1]
        if repeated:
            raise GrammarError(f"{repeated[0]!r} is listed twice")
        return tuple(found)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"is not JSON: {error}") from None


def read_schema(path: str, base: Path) -> dict[str, Any]:
    """The JSON Schema in a file; a relative path starts at `base`. Raises GrammarError."""
    try:
        schema = _parsed((base / Path(path).expanduser()).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError(f"{path}: must hold a JSON object")
    return schema


def source_of(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises GrammarError for what this program refuses by itself."""
    if len(grammar.text) > MAX_BYTES:
        raise GrammarError(f"{len(grammar.text)} characters are more than {MAX_BYTES}")
    if any("\ud800" <= character <= "\udfff" for character in grammar.text):
        raise GrammarError("holds a lone surrogate")
    return _SOURCES[grammar.kind](grammar)


def _choices_source(grammar: Grammar) -> str:
    options = " | ".join(map(json.dumps, grammar.options))  # in ASCII: a Lark literal takes no delete character
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")


def _regex_source(grammar: Grammar) -> str:
    backslashes = len(grammar.text) - len(grammar.text.rstrip("\\"))
    if backslashes % 2:
        raise GrammarError("ends in a lone backslash")
    return LLMatcher.grammar_from_regex(grammar.text)


def _schema_source(grammar: Grammar) -> str:
    schema = _parsed(grammar.text)
    if not isinstance(schema, dict):
        raise GrammarError(f"must be a mapping, got {grammar.text:.100}")
    try:
        check_schema(schema)
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_flexible": False})
    except ValueError as error:
        deep = "recursion limit" in str(error)
        raise GrammarError("its JSON is nested more than 127 deep" if deep else str(error)) from None


_SOURCES: dict[GrammarKind, Callable[[Grammar], str]] = {
    "choices": _choices_source,
    "regex": _regex_source,
    "json_schema": _schema_source,
    "grammar": lambda grammar: LLMatcher.grammar_from_lark(grammar.text),
}


def new_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the start of the grammar. Raises GrammarError when llguidance refuses it or no text matches."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for end in tokenizer.eos_tokens:
            mask &= ~(1 << end)
        if not mask:
            raise GrammarError("matches only the empty text" if matcher.is_accepting() else "matches no text")
    if matcher.is_error():
        raise GrammarError(_one_line(matcher.get_error()))
    return matcher


def _one_line(message: str) -> str:
    """What is wrong, without the picture of the place that llguidance adds on further lines."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["refused"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])[:300]


@lru_cache(maxsize=64)
def check_grammar(grammar: Grammar) -> None:
    """Raises GrammarError when the grammar cannot be honoured. Needs no model: bytes stand for its tokens."""
    new_matcher(LLTokenizer("byte"), source_of(grammar))
