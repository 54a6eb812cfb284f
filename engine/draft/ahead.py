"""Drafts made by a model: token after token, each drawn as the target will draw it, with the noise of its place.

Knows how to run a model ahead of a sequence; which model, and how far, is the drafters' to say.
"""

from typing import Protocol

from ..sequence import Drawn, Feed, Sequence, Step


class Execute(Protocol):
    """A model with pages: what each feed's points draw. `reset`: a run begins, or is over."""

    def reset(self) -> None: ...
    def execute(self, step: Step) -> list[list[Drawn]]: ...


def draw_ahead(model: Execute, wanted: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
    """Up to so many tokens behind each sequence, whose keys but the newest token's are in the model's pages.

    A draft ends early at an end token or a fault.
    """
    drafted: list[tuple[int, ...]] = [()] * len(wanted)
    going = [index for index, (_, most) in enumerate(wanted) if most > 0]
    while going:
        feeds = [Feed(*_newest(wanted[index][0], drafted[index])) for index in going]
        results = model.execute(Step([], feeds))
        going = [
            index for index, (drawn,) in zip(going, results, strict=True) if _append(drafted, index, drawn, wanted)
        ]
    return drafted


def _newest(sequence: Sequence, drafted: tuple[int, ...]) -> tuple[Sequence, int, int, tuple[int, ...]]:
    return sequence, len(sequence.tokens) + len(drafted) - 1, 1, drafted


def _append(drafted: list[tuple[int, ...]], index: int, drawn: Drawn, wanted: list[tuple[Sequence, int]]) -> bool:
    """Takes a drawn token; says whether another may follow."""
    sequence, most = wanted[index]
    if drawn.error is not None:
        return False
    drafted[index] = (*drafted[index], drawn.token)
    return len(drafted[index]) < most and drawn.token not in sequence.task.ends
