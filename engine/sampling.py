"""From a step's logits to what each point draws: masks, penalties, filters, log-probabilities, faults.

Turns sampling parameters of points into the tensors of the sampling kernels; the arithmetic is theirs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import Kernels
from ..kernels.sampling import Filters, Penalties
from ..kernels.sampling.noise import noise_key
from .choices import END
from .grammar_state import Mask, MatcherState
from .grammars import Grammars
from .intake import penalised
from .link import Link
from .request import RowError, TokenLogprob
from .sequence import Drawn, Point

NOT_FINITE = RowError("numeric", "generate", "the model's logits hold NaN or infinity", retryable=False)

Put = Callable[[NDArray[np.generic]], Tensor]  # an array on its way to the device


class Head(Protocol):
    """The end of a model. States are [R, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] float32, new."""

    def draw(self, hidden: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        """Tokens drawn from logits up to `vocabulary` by filters that cut nothing, and whether these were finite."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What points draw: `tokens` [R] int64 on the device, as soon as it gets there; `wait` has all of it here."""

    tokens: Tensor
    wait: Callable[[], list[Drawn]]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws the token at every point of a batch; what a point draws never depends on its neighbours."""

    kernels: Kernels
    vocabulary: int  # token ids of the tokenizer; the head may be wider
    grammars: Grammars
    link: Link

    def prepare(self, points: list[Point]) -> None:
        """Begins to fill the masks that `draw` will need at these points, beside what comes in between."""
        self.grammars.fill([point.grammar for point in points if isinstance(point.grammar, MatcherState)])

    def draw(self, points: list[Point], head: Head, hidden: Tensor) -> Draws:
        """What each point draws by the head's logits of its state, a row of `hidden` [R, H]."""
        if not all(map(draws_freely, points)):
            return self._draw_from(points, head.logits(hidden))
        tokens, finite = head.draw(hidden, self.vocabulary, filters(points, self.link.to_device))
        fetched = self.link.to_host((tokens, finite))

        def wait() -> list[Drawn]:
            drawn, fine = (part.tolist() for part in fetched())
            return [
                Drawn(token) if whole else Drawn(error=NOT_FINITE) for token, whole in zip(drawn, fine, strict=True)
            ]

        return Draws(tokens, wait)

    def _draw_from(self, points: list[Point], logits: Tensor) -> Draws:
        """One result per row of `logits` [R, V] float32, which is used up."""
        put = self.link.to_device
        finite = self.kernels.finite(logits[:, : self.vocabulary])
        logits[:, self.vocabulary :] = -torch.inf
        asked = [row for row, point in enumerate(points) if point.sampling.logprobs is not None]
        raw = logits[put(np.array(asked, np.int64))] if asked else logits[:0]
        scores = ChoiceScores(self.kernels, points, logits, put)
        faults = self._constrain(points, logits)
        logits = self._shape(points, logits)
        tokens = self.kernels.sample(logits, filters(points, put))
        logprobs = self._logprobs(points, asked, raw, tokens)
        fetched = self.link.to_host((tokens, finite, scores.values, *logprobs))

        def wait() -> list[Drawn]:
            drawn, fine, values, *found = (part.tolist() for part in fetched())
            errors = {**{row: NOT_FINITE for row, whole in enumerate(fine) if not whole}, **faults}
            entries = logprob_entries(points, asked, drawn, *found)
            nodes = scores.by_row(values)
            return [
                Drawn(error=errors[row]) if row in errors else Drawn(token, entries.get(row), nodes.get(row, ()))
                for row, token in enumerate(drawn)
            ]

        return Draws(tokens, wait)

    def _constrain(self, points: list[Point], logits: Tensor) -> dict[int, RowError]:
        """Leaves each row with a grammar the tokens that may follow; a grammar that has failed is the row's fault."""
        self.grammars.wait()
        masks: dict[int, Mask] = {}
        faults: dict[int, RowError] = {}
        for row, point in enumerate(points):
            if isinstance(point.grammar, MatcherState):
                early = point.answer_length < point.sampling.min_tokens
                ends = point.sequence.task.ends
                masks[row] = self.grammars.allowed(point.grammar, ends, point.tokens_left, early)
                if point.grammar.error is not None:
                    faults[row] = RowError("bad_grammar", "request", f"the grammar gave up: {point.grammar.error}")
        if masks:
            put = self.link.to_device
            self.kernels.mask(logits, put(np.array(list(masks))), put(np.stack(list(masks.values()))))
        return faults

    def _shape(self, points: list[Point], logits: Tensor) -> Tensor:
        """Penalties, then the end tokens that min_tokens forbids where no grammar's mask has done so."""
        if any(penalised(point.sampling) for point in points):
            logits = self.kernels.penalise(logits, penalties(points, self.link.to_device))
        forbidden = [
            (row, token)
            for row, point in enumerate(points)
            if point.answer_length < point.sampling.min_tokens and not isinstance(point.grammar, MatcherState)
            for token in point.sequence.task.ends
        ]
        if forbidden:
            rows, tokens = self.link.to_device(np.array(forbidden, np.int64).T)
            logits[rows, tokens] = -torch.inf
        return logits

    def _logprobs(self, points: list[Point], asked: list[int], raw: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Of the rows that want them: the drawn token's [A], the best ones' [A, top] and these tokens [A, top]."""
        if not asked:
            return ()
        widest = max(points[row].sampling.logprobs or 0 for row in asked)
        drawn = tokens[self.link.to_device(np.array(asked, np.int64))]
        return self.kernels.logprobs(raw, drawn, min(widest, self.vocabulary))


def draws_freely(point: Point) -> bool:
    """Nobody looks at its logits but for a draw from all of them."""
    sampling = point.sampling
    cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    looked_at = sampling.logprobs is not None or point.node is not None
    constrained = isinstance(point.grammar, MatcherState) or point.answer_length < sampling.min_tokens
    return not (cut or looked_at or constrained or penalised(sampling))


def logprob_entries(
    points: list[Point],
    asked: list[int],
    drawn: list[int],
    own: Sequence[float] = (),
    values: Sequence[Sequence[float]] = (),
    ids: Sequence[Sequence[int]] = (),
) -> dict[int, TokenLogprob]:
    """By row, of those that asked for log-probabilities."""
    found = {}
    for index, row in enumerate(asked):
        top = points[row].sampling.logprobs or 0
        best = tuple(zip(ids[index][:top], values[index][:top], strict=True))
        found[row] = TokenLogprob(drawn[row], own[index], best)
    return found


class ChoiceScores:
    """The model's log-probabilities of what is wanted at nodes of choice tries: `values` [E] on the device."""

    def __init__(self, kernels: Kernels, points: list[Point], logits: Tensor, put: Put) -> None:
        """`logits` [R, V] as the model gave them."""
        self._nodes = {row: point for row, point in enumerate(points) if point.node is not None}
        wanted = {row: self._tokens(point) for row, point in self._nodes.items()}
        self.values = logits[:0, 0]
        if wanted:
            nodes = put(np.array(list(wanted), np.int64))
            some = put(np.array([tokens[0] for tokens in wanted.values()], np.int64))
            raw = logits if len(nodes) == len(logits) else logits[nodes]
            own, _, _ = kernels.logprobs(raw, some, 0)
            whole = logits[nodes, some] - own  # what is taken off logits to make them log-probabilities
            tokens = put(np.array([token for tokens in wanted.values() for token in tokens], np.int64))
            # repeated on the host: a device would have to tell how many these are
            each = put(np.repeat(np.arange(len(wanted)), [len(tokens) for tokens in wanted.values()]))
            self.values = logits[nodes[each], tokens] - whole[each]

    def by_row(self, values: list[float]) -> dict[int, tuple[float, ...]]:
        """`values` on the host, as what each node's task is after; an end counts as any of the end tokens."""
        found, start = {}, 0
        for row, point in self._nodes.items():
            tokens = self._tokens(point)
            known = dict(zip(tokens, values[start : start + len(tokens)], strict=True))
            start += len(tokens)
            if END in (wanted := _wanted(point)):
                known[END] = _sum([known[token] for token in point.sequence.task.ends])
            found[row] = tuple(known[token] for token in wanted)
        return found

    @staticmethod
    def _tokens(point: Point) -> list[int]:
        """Distinct tokens whose scores are needed at a node."""
        wanted = _wanted(point)
        return sorted({*point.sequence.task.ends, *wanted} - {END}) if END in wanted else list(wanted)


def _wanted(point: Point) -> Sequence[int]:
    assert point.sequence.task.trie is not None
    assert point.node is not None
    return point.sequence.task.trie.wanted[point.node]


def _sum(logprobs: Sequence[float]) -> float:
    """The log-probability of one or the other."""
    best = max(logprobs)
    return best + math.log(sum(math.exp(one - best) for one in logprobs))


def filters(points: list[Point], put: Put) -> Filters:
    sampling = [point.sampling for point in points]
    return Filters(
        temperature=put(np.array([one.temperature for one in sampling], np.float32)),
        top_k=put(np.array([one.top_k for one in sampling], np.int64)),
        top_p=put(np.array([one.top_p for one in sampling], np.float32)),
        min_p=put(np.array([one.min_p for one in sampling], np.float32)),
        noise_keys=put(_noise_keys(points)),
    )


def _noise_keys(points: list[Point]) -> NDArray[np.int64]:
    """[R, 2]; zeros where no row draws with noise."""
    if all(point.sampling.greedy for point in points):
        return np.zeros((len(points), 2), np.int64)
    return noise_key(
        np.array([point.sampling.seed for point in points]),
        np.array([point.sequence.task.request.key for point in points]),
        np.array([point.sequence.sample for point in points]),
        np.array([point.answer_length for point in points]),
    )


def penalties(points: list[Point], put: Put) -> Penalties:
    """The token counts of the rows that look back; the others carry neutral factors and no entries."""
    sampling = [point.sampling for point in points]
    counts = [point.counts for point in points]
    tokens = [one.tokens() for one in counts]
    rows = np.repeat(np.arange(len(points)), [len(distinct) for distinct in tokens])
    in_answer = np.concatenate([one.in_answer() for one in counts])
    return Penalties(
        rows=put(rows),
        tokens=put(np.concatenate(tokens)),
        answer_counts=put(in_answer),
        repetition=put(np.array([one.repetition_penalty for one in sampling], np.float32)),
        presence=put(np.array([one.presence_penalty for one in sampling], np.float32)),
        frequency=put(np.array([one.frequency_penalty for one in sampling], np.float32)),
    )
