"""Jinja templates of prompts and of chat models: sandboxed, with the conventions of Hugging Face chat templates.

Knows environments and expressions; which values a template sees is the caller's business.
"""

import datetime
import json
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateError(Exception):
    """A template that cannot be compiled: one line naming the template and its line."""


class NullPrintedError(Exception):
    """A template was about to write a null into a prompt."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model answered, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def prompt_environment(empty_nulls: bool) -> jinja2.Environment:
    """For templates of the job: undefined names are errors and no null is written.

    What is written is sent: blocks on lines of their own leave no trace, a last line break stays.
    """
    environment = _environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.finalize = _write_empty if empty_nulls else _write_no_null
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    return environment


def chat_environment(date: str) -> jinja2.Environment:
    """For a model's chat template; `date` (ISO) is what `strftime_now` tells, so that a resumed job asks the same."""
    environment = _environment()
    now = datetime.datetime.fromisoformat(date)
    environment.globals["strftime_now"] = now.strftime
    return environment


def compile_template(environment: jinja2.Environment, text: str, name: str) -> jinja2.Template:
    """Raises TemplateError with the name and the line for a template that does not parse."""
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"{name}: line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        raise TemplateError(f"{name}: {error}") from error


def names_used(environment: jinja2.Environment, text: str, name: str) -> frozenset[str]:
    """Names that a template takes from the row. Raises TemplateError."""
    compile_template(environment, text, name)
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(text)) - environment.globals.keys())


def _environment(**options: Any) -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        autoescape=False,
        **options,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=str
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _write_no_null(value: Any) -> Any:
    if value is None:
        raise NullPrintedError
    return _refuse_function(value)


def _write_empty(value: Any) -> Any:
    return "" if value is None else _refuse_function(value)


def _refuse_function(value: Any) -> Any:
    if isinstance(value, (Callable, type)) and not isinstance(value, jinja2.Undefined):  # type: ignore[arg-type]
        raise jinja2.TemplateError(f"writes a function, not a value: {getattr(value, '__name__', value)!r}")
    return value


def explain(error: Exception, names: Iterable[str] = ()) -> str:
    """What went wrong while a template was rendered, on one line."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, jinja2.UndefinedError):
        return f"{message}; columns used: {', '.join(sorted(names))}" if names else message
    return message if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {message}"
