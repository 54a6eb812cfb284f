"""How often each token stands in prompt and answer, in the form that penalties are computed from.

Knows tokens and counts of one sequence; what a penalty does with them is a kernel's business.
"""

from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class TokenCounts(Protocol):
    """Distinct tokens of prompt and answer, [E] int64, and their times in the answer alone, [E] float32."""

    def add(self, token: int) -> None: ...
    def ahead(self, tokens: Sequence[int]) -> "TokenCounts":
        """The counts as they would be behind some more tokens; these stay as they are."""
        ...

    def tokens(self) -> NDArray[np.int64]: ...
    def in_answer(self) -> NDArray[np.float32]: ...


class NoCounts:
    """For sampling that does not look back."""

    def add(self, token: int) -> None:
        return None

    def ahead(self, tokens: Sequence[int]) -> Self:
        return self

    def tokens(self) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def in_answer(self) -> NDArray[np.float32]:
        return np.empty(0, np.float32)


class PromptAndAnswerCounts:
    """Arrays that grow with the answer, so that a step copies them and rebuilds nothing."""

    def __init__(self, prompt: Sequence[int], max_tokens: int) -> None:
        distinct = np.unique(np.asarray(prompt, np.int64))
        self._place = {int(token): place for place, token in enumerate(distinct)}
        self._tokens = np.concatenate([distinct, np.zeros(min(max_tokens, 64), np.int64)])
        self._counts = np.zeros(len(self._tokens), np.float32)

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += 1

    def ahead(self, tokens: Sequence[int]) -> "PromptAndAnswerCounts":
        if not tokens:
            return self
        later = copy(self)
        later._place, later._tokens, later._counts = dict(self._place), self._tokens.copy(), self._counts.copy()
        for token in tokens:
            later.add(token)
        return later

    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: len(self._place)]

    def in_answer(self) -> NDArray[np.float32]:
        return self._counts[: len(self._place)]
