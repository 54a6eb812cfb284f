"""Simple and true advice about a template: what stands where, and what that costs in shared prefixes.

Knows template texts and how often column values repeat; the figures come from the analysis of the prompts.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import jinja2
import jinja2.meta

from batchgen.pipeline.config import PromptSettings

from .analysis import PromptStatistics

_LONG_TEXT = 40  # characters of fixed text that are worth moving
_WELL_SHARED = 0.5


def advise(prompt: PromptSettings, statistics: PromptStatistics, distinct: Mapping[str, float]) -> Iterator[str]:
    """Lines of advice; none when nothing is to be gained. `distinct`: share of different values per column used."""
    if statistics.saved_share < _WELL_SHARED and prompt.messages_column is None:
        yield from _late_text(prompt)
        yield from _early_column(prompt, distinct)
    if statistics.duplicates:
        yield f"{statistics.duplicates} prompts equal another one; their prompt tokens are computed once"
    if statistics.near_limit:
        yield f"{statistics.near_limit} prompts come within a tenth of the context's end; see prompt.on_too_long"


def _late_text(prompt: PromptSettings) -> Iterator[str]:
    parts = template_parts(prompt)
    names = [name for name, _ in parts if name is not None]
    if not names:
        return
    first = next(at for at, (name, _) in enumerate(parts) if name is not None)
    late = sum(len(text.strip()) for name, text in parts[first:] if name is None)
    if late >= _LONG_TEXT:
        yield (
            f"{late} characters of fixed text stand after {{{{ {names[0]} }}}}, where rows cannot share them; "
            "put the instructions first and the columns last"
        )


def _early_column(prompt: PromptSettings, distinct: Mapping[str, float]) -> Iterator[str]:
    names = list(dict.fromkeys(name for name, _ in template_parts(prompt) if name is not None and name in distinct))
    for early, late in pairwise(names):
        if distinct[early] > 0.9 and distinct[late] < 0.5:
            yield f"{early!r} differs in nearly every row and stands before {late!r}, which repeats; swap them to share"


def template_parts(prompt: PromptSettings) -> list[tuple[str | None, str]]:
    """Columns (name, "") and fixed texts (None, text) of a prompt in their order."""
    texts = [prompt.text] if prompt.text is not None else [message.content for message in prompt.messages or ()]
    return [part for text in texts for part in _parts(text or "")]


def _parts(text: str) -> Iterator[tuple[str | None, str]]:
    environment = jinja2.Environment(autoescape=False)
    names = jinja2.meta.find_undeclared_variables(environment.parse(text))
    for _, kind, value in environment.lex(text):
        if kind == "data":
            yield None, value
        elif kind == "name" and value in names:
            yield value, ""
