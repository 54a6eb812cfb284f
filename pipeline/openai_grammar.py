"""What a line of an OpenAI batch file says about the form of its answer: `response_format`, and vLLM's own parameters.

Knows the parameters; whether a grammar can be honoured is decided where grammars are.
"""

from collections.abc import Callable, Mapping
from typing import Any

from batchgen.engine.grammar import Grammar, GrammarError, check_grammar


class BadGrammarError(Exception):
    """The form that is asked for is none, or cannot be honoured; the message names the parameter first."""


def one_grammar(found: Mapping[str, Any], key: str, value: Any) -> Grammar | None:
    """The grammar a parameter asks for, beside what earlier ones asked for. Raises BadGrammarError."""
    try:
        grammar = GRAMMAR_PARAMETERS[key](value)
        if grammar is not None:
            check_grammar(grammar)
    except (GrammarError, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, GrammarError) else "is not as the API describes it"
        raise BadGrammarError(f"{key}: {reason}") from error
    if grammar is not None and found.get("grammar") is not None:
        raise BadGrammarError(f"{key}: only one form can be asked for")
    return found.get("grammar") if grammar is None else grammar


def _response_format(value: Mapping[str, Any]) -> Grammar | None:
    kind = value["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_schema({"type": "object"})
    if kind == "json_schema":
        return Grammar.json_schema(value["json_schema"]["schema"])
    raise GrammarError(f"type must be text, json_object or json_schema, got {kind!r:.60}")


def _schema(value: Any) -> Grammar:
    return Grammar("json_schema", value) if isinstance(value, str) else Grammar.json_schema(value)


def _structured(value: Mapping[str, Any]) -> Grammar | None:
    """vLLM's `structured_outputs`: an object with one of its kinds."""
    given = {key: part for key, part in value.items() if part is not None}
    if len(given) != 1 or not given.keys() <= _KINDS.keys():
        raise GrammarError(f"must have exactly one of {', '.join(_KINDS)}")
    ((key, part),) = given.items()
    return _KINDS[key](part)


_KINDS: dict[str, Callable[[Any], Grammar]] = {
    "choice": Grammar.choices,
    "regex": Grammar.regex,
    "json": _schema,
    "grammar": Grammar.lark,
}
GRAMMAR_PARAMETERS: dict[str, Callable[[Any], Grammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    **{f"guided_{name}": make for name, make in _KINDS.items()},
}
