"""The only loop there is: choose a step, get it under way, take note of what came of an earlier one.

Knows how many steps may be under way at once; what a step is, and what the device does with it, is not known here.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

from .draft.speculation import Speculation
from .request import Completion
from .scheduler import Scheduler
from .sequence import Drawn, Step

Outcome = Callable[[], list[list[Drawn]]]  # waits for a step: one list per feed, what each of its points drew


@dataclass(frozen=True, slots=True)
class StepLoop:
    """`launch` starts a step and returns its outcome; the device takes steps in their order.

    With `look_ahead` 1 the next step is planned and launched before the outcome of the one under way is asked for.
    """

    scheduler: Scheduler
    launch: Callable[[Step], Outcome]
    speculation: Speculation
    look_ahead: int

    def run(self, interrupted: Callable[[], bool], exhausted: Callable[[], bool]) -> Iterator[Completion]:
        """Completions as rows end, until there is nothing left to run, or, interrupted, nothing under way."""
        under_way: deque[tuple[Step, Outcome, float]] = deque()
        ended = 0.0
        while True:
            began = perf_counter()
            step = None if interrupted() else self.scheduler.schedule()
            if step is not None:
                under_way.append((step, self.launch(step), began))
                self.scheduler.launched(step)
            over = step is None and not under_way and (interrupted() or exhausted())
            if under_way and (step is None or len(under_way) > self.look_ahead):
                first, outcome, began = under_way.popleft()
                drawn = outcome()
                began, ended = max(began, ended), perf_counter()
                self.speculation.timed(first, ended - began)
                self.scheduler.commit(first, drawn)
            yield from self.scheduler.take_finished()
            if over:
                return
