"""Runs of the policy of `auto` on a machine made of a formula: answers of known lengths, drafts right now and then."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from batchgen.engine.draft.controller import Controller
from batchgen.engine.draft.speculation import Draft
from batchgen.engine.request import Request, Sampling
from batchgen.engine.sequence import Feed, Sequence, Step, Task

DRAFT = Draft((1,) * 8, (0.8,) * 8, 8, "own text")


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a step: `floor` at least; past it `fixed` + `token` for each token. `asking`: of a draft. `first`:
    seconds more that the first step with drafts takes.
    """

    fixed: float
    token: float
    floor: float = 0.0
    asking: float = 0.0
    noise: float = 0.0
    first: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        return max(self.floor, self.fixed + self.token * num_tokens)


@dataclass(slots=True)
class Row:
    """An answer of `length` tokens; a drafted token is right with chance `accept`."""

    length: int
    accept: float
    certain: bool = True
    sequence: Sequence = field(init=False)

    def __post_init__(self) -> None:
        sampling = Sampling(max_tokens=self.length if self.certain else 10 * self.length, ignore_eos=self.certain)
        task = Task(Request(0, [0], sampling), (0,), 0, frozenset(), [None])
        self.sequence = Sequence(task, 0, [0], None, None)

    @property
    def left(self) -> int:
        return self.length - self.sequence.answer_length


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0


def run(machine: Machine, rows: list[Row], at_once: int, policy: Controller | None, seed: int = 0) -> Outcome:
    """All rows in their order, `at_once` at a time; prompts cost nothing. No policy: no drafts."""
    chance, outcome, waiting, running = random.Random(seed), Outcome(), list(rows), []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
        step = step_of([row.sequence for row in running], draining=not waiting)
        lengths, asking = [0] * len(running), 0.0
        opened = policy is not None and policy.opens(step)
        if opened:
            asking = machine.asking * len(running)
            policy.asked(len(running), asking)
            drafts = {row.sequence: DRAFT.cut(max(0, min(8, row.left - 1))) for row in running}
            lengths = policy.lengths(drafts, step)
        taken = step_of([row.sequence for row in running], lengths, not waiting, opened)
        took = machine.seconds(taken.num_tokens) * (1 + machine.noise * chance.random()) + asking
        took += machine.first * (any(lengths) and not outcome.drafted)
        outcome.seconds, outcome.steps = outcome.seconds + took, outcome.steps + 1
        outcome.drafted += sum(lengths)
        if policy is not None:
            policy.timed(taken, took)
        for row, length in zip(running, lengths, strict=True):
            right = next((place for place in range(length) if chance.random() > row.accept), length)
            row.sequence.tokens += [1] * (1 + right)
            row.sequence.computed = len(row.sequence.tokens) - 1
            if policy is not None:
                policy.verified(row.sequence, DRAFT.cut(length), right)
                if row.left <= 0:
                    policy.ended(row.sequence)
        running = [row for row in running if row.left > 0]
    return outcome


def step_of(
    sequences: list[Sequence],
    lengths: list[int] | None = None,
    draining: bool = False,
    tries_drafts: bool = False,
    counts: list[int] | None = None,
) -> Step:
    """`lengths` of drafts, `counts` of known tokens that are fed."""
    feeds = [
        Feed(sequence, len(sequence.tokens) - count, count + length, (1,) * length)
        for sequence, length, count in zip(
            sequences, lengths or [0] * len(sequences), counts or [1] * len(sequences), strict=True
        )
    ]
    return Step([], feeds, draining, tries_drafts)


def gain(machine: Machine, rows: Callable[[], list[Row]], at_once: int, seed: int = 0) -> tuple[float, Outcome]:
    """How many times sooner a run ends than without drafts, and what it was."""
    with_drafts = run(machine, rows(), at_once, Controller(), seed)
    return run(machine, rows(), at_once, None, seed).seconds / with_drafts.seconds, with_drafts
