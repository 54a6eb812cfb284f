"""`prompt.reorder`: the order of a template's blocks in which rows share most, chosen from the first rows.

Knows block values of a sample; files and jobs are not known. Same rows, same templates: same order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import PromptSettings
from .pieces import Blocks, FixedTemplateError, Piece, split_blocks, templates_of, with_templates
from .rows import Source
from .templates import compile_template, prompt_environment
from .values import is_null, to_python

SAMPLE_ROWS = 10_000
_TRIED = 8  # blocks of which every order is weighed; more are ordered by what each shares alone

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Arrangement:
    """The chosen order of the blocks of each template, by its name, counted from 0.

    `before` and `after`: characters of blocks in the sample that differ from what another row has in the same place
    behind the same blocks, in the given order and in this one.
    """

    orders: dict[str, list[int]] = field(default_factory=dict)
    rows: int = 0
    before: int = 0
    after: int = 0

    @property
    def changed(self) -> dict[str, list[int]]:
        return {name: order for name, order in self.orders.items() if order != sorted(order)}

    def describe(self) -> str:
        """One line for people; blocks are counted from 1."""
        if not self.rows:
            return "prompt.reorder: every template stays as it is (no rows, or no neighbouring blocks with fields)"
        if not self.changed:
            return f"prompt.reorder: every template stays as it is (looked at the first {self.rows} rows)"
        parts = [f"{name} as blocks {', '.join(str(at + 1) for at in order)}" for name, order in self.changed.items()]
        saved = 1 - self.after / self.before
        return f"prompt.reorder: {'; '.join(parts)}: {saved:.0%} less text of its fields to compute in {self.rows} rows"

    def applied(self, prompt: PromptSettings) -> PromptSettings:
        """The section with its templates in this order. Raises FixedTemplateError when it does not fit them."""
        texts = templates_of(prompt)
        return with_templates(
            prompt, {name: split_blocks(texts[name]).arranged(order) for name, order in self.orders.items()}
        )


def require_movable(prompt: PromptSettings) -> None:
    """Raises FixedTemplateError, naming the template, when `prompt.reorder` cannot be honoured."""
    for name, text in templates_of(prompt).items() if prompt.reorder else ():
        try:
            split_blocks(text)
        except FixedTemplateError as error:
            raise FixedTemplateError(f"{name}: {error}; remove it, or prompt.reorder") from error


def arrange(prompt: PromptSettings, source: Source) -> Arrangement:
    """The best order by the first rows of the input. Raises FixedTemplateError."""
    templates = {name: split_blocks(text) for name, text in templates_of(prompt).items()}
    fields = [piece for found in templates.values() for piece in found.blocks if piece.names]
    if all(len(run) == 1 for found in templates.values() for run in found.runs):
        return Arrangement({name: list(range(len(found.blocks))) for name, found in templates.items()})
    chooser = _Chooser(Sample.of(prompt, fields, source))
    orders = {name: chooser.order(found) for name, found in templates.items()}
    return Arrangement(orders, chooser.sample.rows, chooser.before, chooser.after)


class _Chooser:
    """Goes through the templates of a prompt; `base` numbers what the rows have in all blocks so far."""

    def __init__(self, sample: "Sample") -> None:
        self.sample = sample
        self.before = self.after = 0
        self._base = np.zeros(sample.rows, np.int64)
        self._columns = iter(zip(sample.codes, sample.lengths, strict=True))

    def order(self, found: Blocks) -> list[int]:
        """The order of a template's blocks."""
        order = list(range(len(found.blocks)))
        for run in found.runs:
            codes, lengths = zip(*(next(self._columns) for _ in run), strict=True)
            chosen = best_order(codes, lengths, self._base)
            self.before += self._cost(range(len(run)), codes, lengths)
            self.after += self._cost(chosen, codes, lengths)
            order[run.start : run.stop] = [run.start + at for at in chosen]
            for column in codes:
                self._base = joint(self._base, column)
        return order

    def _cost(self, order: Sequence[int], codes: Sequence[Codes], lengths: Sequence[Codes]) -> int:
        total, base = 0, self._base
        for at in order:
            base = joint(base, codes[at])
            total += distinct_length(base, lengths[at])
        return total


@dataclass(frozen=True)
class Sample:
    """Of each piece and row of a sample: a number that equal texts have in common, and their length."""

    rows: int
    codes: list[Codes]
    lengths: list[Codes]

    @classmethod
    def of(cls, prompt: PromptSettings, pieces: Sequence[Piece], source: Source, limit: int = SAMPLE_ROWS) -> "Sample":
        """Renders the pieces with the first rows; rows that fail are left out."""
        environment = prompt_environment(prompt.on_null == "empty")
        templates = [compile_template(environment, piece.source, "prompt") for piece in pieces]
        numbers: list[dict[str, int]] = [{} for _ in pieces]
        texts = [rendered for row in first_rows(prompt, pieces, source, limit) if (rendered := _render(templates, row))]
        codes = [[known.setdefault(row[at], len(known)) for row in texts] for at, known in enumerate(numbers)]
        lengths = [[len(row[at]) for row in texts] for at in range(len(pieces))]
        return cls(len(texts), [np.array(c, np.int64) for c in codes], [np.array(n, np.int64) for n in lengths])


def first_rows(
    prompt: PromptSettings, pieces: Sequence[Piece], source: Source, limit: int
) -> Iterator[Mapping[str, Any]]:
    """Values of the first rows that can be read, with the nulls a prompt may not have left out."""
    names = sorted(frozenset().union(*(piece.names for piece in pieces)))
    taken = 0
    for batch in source.batches(columns=names):
        columns = {name: to_python(batch.columns.column(name))[0] for name in names}
        for offset in range(min(batch.num_rows, limit - taken)):
            row = {name: values[offset] for name, values in columns.items()}
            nulls = [name for name in names if is_null(row[name])]
            if offset not in batch.errors and (not nulls or prompt.on_null == "empty"):
                yield {**row, **dict.fromkeys(nulls, "")}
        taken += batch.num_rows
        if taken >= limit:
            return


def _render(templates: Sequence[Any], row: Mapping[str, Any]) -> list[str] | None:
    try:
        return [template.render(row) for template in templates]
    except Exception:  # the row's own error, told when it is rendered as a prompt
        return None


def joint(first: Codes, second: Codes) -> Codes:
    """One number for each pair of numbers."""
    if not len(first):
        return first
    numbers: Codes = np.unique(first * (int(second.max()) + 1) + second, return_inverse=True)[1]
    return numbers


def distinct_length(codes: Codes, lengths: Codes) -> int:
    """Total length of the texts of different numbers, each counted once."""
    return int(lengths[np.unique(codes, return_index=True)[1]].sum())


def best_order(codes: Sequence[Codes], lengths: Sequence[Codes], base: Codes) -> list[int]:
    """The order of columns in which rows sorted by them share most, behind what `base` numbers.

    The cost of an order is the number of characters in the trie of its rows, a column being one edge. It is added up
    over sets of columns, as what is distinct in a set does not depend on its order; so 8 columns take 1,024 sums.
    Among equals the order nearest to the given one wins.
    """
    if len(codes) > _TRIED:
        return sorted(range(len(codes)), key=lambda at: (-_shared(codes[at], lengths[at]), at))
    joints: dict[frozenset[int], Codes] = {frozenset(): base}
    best: dict[frozenset[int], tuple[int, list[int]]] = {frozenset(): (0, [])}
    for size in range(1, len(codes) + 1):
        for members in map(frozenset, combinations(range(len(codes)), size)):
            last = max(members)
            joints[members] = joint(joints[members - {last}], codes[last])
            best[members] = min(_ending_with(members, at, joints[members], lengths, best) for at in sorted(members))
    return best[frozenset(range(len(codes)))][1]


def _ending_with(
    members: frozenset[int],
    last: int,
    codes: Codes,
    lengths: Sequence[Codes],
    best: Mapping[frozenset[int], tuple[int, list[int]]],
) -> tuple[int, list[int]]:
    cost, order = best[members - {last}]
    return cost + distinct_length(codes, lengths[last]), [*order, last]


def _shared(codes: Codes, lengths: Codes) -> int:
    """Sum over different texts of (count - 1) x length."""
    return int(lengths.sum()) - distinct_length(codes, lengths)
