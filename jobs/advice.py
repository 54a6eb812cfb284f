"""Advice about a template: an order of its parts in which rows share more, tried on the first rows of the input.

Knows template texts and how to have prompts of a sample rendered; nothing is advised that the sample does not bear out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from batchgen.engine.plan import plan
from batchgen.pipeline.config import PromptSettings
from batchgen.pipeline.pieces import FixedTemplateError, Piece, split_pieces, templates_of, with_templates
from batchgen.pipeline.reorder import Sample, arrange, best_order
from batchgen.pipeline.rows import Source

_LONG_TEXT = 40  # characters of fixed text that are worth moving
_WORTH = 0.02  # of the sample's prompt tokens
_LOOKED_AT = 2_000  # rows whose values decide which order is tried

Render = Callable[[PromptSettings], dict[int, list[int]]]  # the sample's prompts by position


@dataclass(frozen=True)
class Advice:
    """What to change. With it, `saved_tokens` of the sample's `sample_tokens` are not computed that are now."""

    text: str
    prompt: PromptSettings
    saved_tokens: int = 0
    sample_tokens: int = 0
    sample_rows: int = 0

    @property
    def saved_share(self) -> float:
        return self.saved_tokens / self.sample_tokens if self.sample_tokens else 0.0


def advise(prompt: PromptSettings, source: Source, render: Render) -> list[Advice]:
    """The changes that save most first; none where nothing is to be gained."""
    if prompt.messages_column is not None:
        return []
    tried = list(proposals(prompt, source))
    if not tried:
        return []
    now = render(prompt)
    measured = [_measure(proposal, now, render(proposal.prompt)) for proposal in tried]
    worth = [advice for advice in measured if advice.saved_share >= _WORTH]
    return sorted(worth, key=lambda advice: -advice.saved_tokens)


def proposals(prompt: PromptSettings, source: Source) -> Iterator[Advice]:
    """Other orders of the template, not measured yet."""
    for find in (_reordered_blocks, _late_text, _early_fields):
        try:
            yield from find(prompt, source)
        except FixedTemplateError:  # parts that depend on each other are no matter of order
            continue


def _measure(proposal: Advice, now: dict[int, list[int]], then: dict[int, list[int]]) -> Advice:
    """Both ways of writing the same rows are planned."""
    rows = sorted(now.keys() & then.keys())
    old, new = ([prompts[row] for row in rows] for prompts in (now, then))
    saved = plan(old).distinct_tokens - plan(new).distinct_tokens
    return Advice(proposal.text, proposal.prompt, saved, sum(map(len, old)), len(rows))


def _reordered_blocks(prompt: PromptSettings, source: Source) -> Iterator[Advice]:
    if prompt.reorder:
        return
    found = arrange(prompt, source)
    if found.changed:
        orders = ", ".join(
            f"{name} as blocks {' '.join(str(at + 1) for at in order)}" for name, order in found.changed.items()
        )
        yield Advice(f"prompt.reorder: true would write {orders}", found.applied(prompt))


def _late_text(prompt: PromptSettings, source: Source) -> Iterator[Advice]:
    """Fixed text behind the first field goes in front of it."""
    parts = {name: split_pieces(text) for name, text in templates_of(prompt).items()}
    home = next((name for name, pieces in parts.items() if any(piece.names for piece in pieces)), None)
    if home is None:
        return
    early, late, texts = list(parts).index(home), [], {}
    for at, (name, pieces) in enumerate(parts.items()):
        first = next((place for place, piece in enumerate(pieces) if piece.names), len(pieces)) if at == early else 0
        moved = [piece for piece in pieces[first:] if _is_long_text(piece)] if at >= early else []
        late += moved
        texts[name] = "".join(piece.source for piece in pieces if piece not in moved)
    if late:
        characters = sum(len(piece.source.strip()) for piece in late)
        field = next(min(piece.names) for piece in parts[home] if piece.names)
        texts[home] = "\n\n".join([*(piece.source.strip() for piece in late), texts[home].strip("\n")])
        yield Advice(
            f"{characters} characters of fixed text stand after {{{{ {field} }}}}, where rows cannot share them; "
            "put the instructions first and the columns last",
            with_templates(prompt, texts),
        )


def _is_long_text(piece: Piece) -> bool:
    return not piece.names and len(piece.source.strip()) >= _LONG_TEXT


def _early_fields(prompt: PromptSettings, source: Source) -> Iterator[Advice]:
    """The fields of a template trade places, the texts between them stay."""
    for name, text in templates_of(prompt).items():
        pieces = split_pieces(text)
        places = [at for at, piece in enumerate(pieces) if piece.names]
        fields = [pieces[at] for at in places]
        if len(fields) < 2:
            continue
        sample = Sample.of(prompt, fields, source, _LOOKED_AT)
        order = best_order(sample.codes, sample.lengths, np.zeros(sample.rows, np.int64))
        if order == sorted(order):
            continue
        moved = dict(zip(places, (fields[at] for at in order), strict=True))
        wanted = ", ".join(fields[at].source for at in order)
        early = next(fields[at].source for at, chosen in enumerate(order) if at != chosen)
        yield Advice(
            f"in {name} {early} stands before fields that repeat more; put the fields in the order {wanted}",
            with_templates(prompt, {name: "".join(moved.get(at, piece).source for at, piece in enumerate(pieces))}),
        )


def in_words(found: Iterable[Advice], tokens: int) -> Iterator[str]:
    """One line each; `tokens` are those of the whole input."""
    for advice in found:
        yield (
            f"{advice.text} (saves {advice.saved_share:.0%}, some {round(advice.saved_share * tokens)} tokens; "
            f"tried on the first {advice.sample_rows} rows)"
        )
