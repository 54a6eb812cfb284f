"""Asks rows again whose answer was cut or cannot be parsed, with new noise, as often as the job allows.

Stands between rows and engine and looks like an engine; what an answer is worth is decided by a function it is given.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from batchgen.engine.request import MAX_SEED, Completion, Request

from .flow import Generator

_STEP = 0x9E3779B97F4A7C15  # odd, so that no two attempts at a seed share their noise


@dataclass(slots=True)
class Retrying:
    """An engine that asks up to `retries` times more. A greedy row is asked once: it would answer the same."""

    engine: Generator
    retries: int
    is_whole: Callable[[Completion], bool]

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """One completion per request, that of its last attempt; rows asked again go first while others still come."""
        source, again = iter(requests), deque[_Attempt]()
        asked: dict[int, _Attempt] = {}
        while True:
            for completion in self.engine.run(self._ask(source, again, asked)):
                attempt = asked.pop(completion.key)
                if attempt.number <= self.retries and self._is_worth_another(attempt.request, completion):
                    again.append(_Attempt(attempt.request, attempt.number + 1))
                else:
                    yield replace(completion, attempts=attempt.number)
            if not again:
                return

    def interrupt(self) -> None:
        """Ends the run that goes on after its present step."""
        self.engine.interrupt()

    def _is_worth_another(self, request: Request, completion: Completion) -> bool:
        return completion.error is None and not request.sampling.greedy and not self.is_whole(completion)

    @staticmethod
    def _ask(source: Iterator[Request], again: "deque[_Attempt]", asked: "dict[int, _Attempt]") -> Iterator[Request]:
        while True:
            if again:
                attempt = again.popleft()
            elif (request := next(source, None)) is not None:
                attempt = _Attempt(request, 1)
            else:
                return
            asked[attempt.request.key] = attempt
            yield attempt.as_asked()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A request and how often it has been asked, this time included."""

    request: Request
    number: int

    def as_asked(self) -> Request:
        """The request with the noise of the attempt; the first has the row's own."""
        if self.number == 1:
            return self.request
        sampling = self.request.sampling
        seed = (sampling.seed + (self.number - 1) * _STEP) & MAX_SEED
        return replace(self.request, sampling=replace(sampling, seed=seed))
