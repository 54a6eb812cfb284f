"""Arguments and options that several commands share.

Knows click; what a command does with them is its own business.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .errors import UsageError

JOB = click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))


def debug(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option --debug, which every command knows and `cli.invoke` obeys."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_remember_debug, help="Show the traceback of an error."
    )(function)


def _remember_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().obj["debug"] = True


def settable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option --set, whose values arrive as `assignments`."""
    return click.option(
        "--set",
        "assignments",
        metavar="KEY=VALUE",
        multiple=True,
        help="Replace a value of the job file, like generation.max_tokens=32. May be repeated.",
    )(function)


def names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The words between commas. Raises UsageError, which names the option, for one that is not known."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    for name in found:
        if name not in known:
            raise UsageError(f"{option}: knows {', '.join(known)}, got {name!r}")
    return found
