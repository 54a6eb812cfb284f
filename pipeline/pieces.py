"""Templates cut into what can trade places: texts, fields, whole control structures, and blocks between blank lines.

Knows the text of a template and the names in it; which order is worth having is decided elsewhere.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2
import jinja2.meta

from .config import PromptSettings
from .templates import TemplateError

_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_STRUCTURES = frozenset({"for", "if", "filter", "with", "generation", "autoescape"})
_LASTING = frozenset({"set", "macro", "import", "from", "include", "extends", "block", "call"})


class FixedTemplateError(TemplateError):
    """A template whose parts depend on each other: one line that says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some source of a template and the names it takes from the row."""

    source: str
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Blocks:
    """A template as blocks and what stands between them: there is one separator less than blocks."""

    blocks: tuple[Piece, ...]
    separators: tuple[str, ...]

    @property
    def runs(self) -> list[range]:
        """Neighbouring blocks with fields: those of one run may trade places."""
        runs: list[range] = []
        start = 0
        for index in range(len(self.blocks) + 1):
            if index == len(self.blocks) or not self.blocks[index].names:
                if index > start:
                    runs.append(range(start, index))
                start = index + 1
        return runs

    def arranged(self, order: Sequence[int]) -> str:
        """The template with the block `order[i]` at place i; blank lines stay where they are."""
        if sorted(order) != list(range(len(self.blocks))):
            raise FixedTemplateError(f"has {len(self.blocks)} blocks, which {list(order)} does not order")
        sources = [self.blocks[index].source for index in order]
        return "".join(part for pair in zip(sources, (*self.separators, ""), strict=True) for part in pair)


def templates_of(prompt: PromptSettings) -> dict[str, str]:
    """The Jinja texts of the section by their names in messages."""
    if prompt.text is not None:
        return {"prompt.text": prompt.text}
    return {f"prompt.messages[{at}].content": message.content for at, message in enumerate(prompt.messages or ())}


def with_templates(prompt: PromptSettings, texts: dict[str, str]) -> PromptSettings:
    """The same section with other Jinja texts under these names."""
    if prompt.text is not None:
        return prompt.model_copy(update={"text": texts.get("prompt.text", prompt.text)})
    messages = [
        message.model_copy(update={"content": texts.get(name, message.content)})
        for name, message in zip(templates_of(prompt), prompt.messages or (), strict=True)
    ]
    return prompt.model_copy(update={"messages": tuple(messages)})


def split_blocks(text: str) -> Blocks:
    """Cuts a template at blank lines outside of its structures. Raises FixedTemplateError."""
    blocks, separators = [Piece("")], []
    for piece in split_pieces(text):
        if piece.names or piece.source.startswith("{"):
            blocks[-1] = _joined(blocks[-1], piece)
            continue
        first, *others = _BLANK_LINES.split(piece.source)
        separators += _BLANK_LINES.findall(piece.source)
        blocks[-1] = _joined(blocks[-1], Piece(first))
        blocks += [Piece(other) for other in others]
    return Blocks(tuple(blocks), tuple(separators))


def split_pieces(text: str) -> list[Piece]:
    """Texts, `{{ }}` fields and whole structures of a template, in order. Raises FixedTemplateError."""
    environment = jinja2.Environment(keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"])
    return [
        Piece(source) if kind == "data" else Piece(source, _names(environment, source))
        for kind, source in _top_level(environment, text)
    ]


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(first.source + second.source, first.names | second.names)


def _names(environment: jinja2.Environment, source: str) -> frozenset[str]:
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError as error:
        raise FixedTemplateError(f"has a part that cannot be moved: {error}") from error
    return frozenset(names - environment.globals.keys())


def _top_level(environment: jinja2.Environment, text: str) -> Iterator[tuple[str, str]]:
    """(data or code, source) of everything that stands in no structure."""
    depth, source, opening = 0, "", False
    for _, kind, value in environment.lex(text):
        if kind == "data" and depth == 0 and not source:
            yield "data", value
            continue
        source += value
        if kind in ("block_begin", "raw_begin"):
            opening, depth = kind == "block_begin", depth + (kind == "raw_begin")
        elif opening and kind == "name":
            depth, opening = depth + _step(value), False
        elif kind == "raw_end":
            depth -= 1
        if depth == 0 and kind in ("variable_end", "block_end", "raw_end", "comment_end"):
            yield "code", source
            source = ""


def _step(keyword: str) -> int:
    """How a tag changes the depth. Raises FixedTemplateError for one whose effect lasts beyond it."""
    if keyword in _LASTING:
        raise FixedTemplateError(f"has a {{% {keyword} %}}, on which what follows may depend")
    return -1 if keyword.startswith("end") else int(keyword in _STRUCTURES)
