"""From a step's logits to what each point draws: masks, penalties, filters, log-probabilities, faults.

Turns sampling parameters of points into the tensors of the sampling kernels; the arithmetic is theirs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import Kernels
from ..kernels.sampling import Filters, Penalties
from ..kernels.sampling.noise import noise_key
from .choices import END
from .grammar_state import Mask, MatcherState
from .grammars import Grammars
from .intake import penalised
from .request import RowError, TokenLogprob
from .sequence import Drawn, Point

NOT_FINITE = RowError("numeric", "generate", "the model's logits hold NaN or infinity", retryable=False)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws the token at every point of a batch; what a point draws never depends on its neighbours."""

    kernels: Kernels
    vocabulary: int  # token ids of the tokenizer; the head may be wider
    grammars: Grammars

    def prepare(self, points: list[Point]) -> None:
        """Begins to fill the masks that `draw` will need at these points, beside what comes in between."""
        self.grammars.fill([point.grammar for point in points if isinstance(point.grammar, MatcherState)])

    def draw(self, points: list[Point], logits: Tensor) -> list[Drawn]:
        """One result per row of `logits` [R, V] float32, which is used up."""
        finite = self.kernels.finite(logits[:, : self.vocabulary]).tolist()
        logits[:, self.vocabulary :] = -torch.inf
        faults = [None if fine else NOT_FINITE for fine in finite]
        entries = self._logprob_source(points, logits)
        scores = choice_scores(points, logits)
        self._constrain(points, logits, faults)
        logits = self._shape(points, logits)
        tokens = self.kernels.sample(logits, filters(points, logits.device))
        logprobs = self._logprobs(points, entries, tokens)
        return [
            Drawn(token, logprob, scores.get(row)) if fault is None else Drawn(error=fault)
            for row, (token, logprob, fault) in enumerate(zip(tokens.tolist(), logprobs, faults, strict=True))
        ]

    def _constrain(self, points: list[Point], logits: Tensor, faults: list[RowError | None]) -> None:
        """Leaves each row with a grammar the tokens that may follow; a grammar that has failed is the row's fault."""
        self.grammars.wait()
        masks: dict[int, Mask] = {}
        for row, point in enumerate(points):
            if isinstance(point.grammar, MatcherState):
                masks[row] = self.grammars.allowed(point.grammar, point.sequence.task.ends, point.tokens_left)
                if faults[row] is None and point.grammar.error is not None:
                    faults[row] = RowError("bad_grammar", "request", f"the grammar gave up: {point.grammar.error}")
        if masks:
            rows = torch.tensor(list(masks), device=logits.device)
            self.kernels.mask(logits, rows, torch.from_numpy(np.stack(list(masks.values()))).to(logits.device))

    def _shape(self, points: list[Point], logits: Tensor) -> Tensor:
        """Penalties, then the end tokens that min_tokens forbids."""
        if any(penalised(point.sampling) for point in points):
            logits = self.kernels.penalise(logits, penalties(points, logits.device))
        forbidden = [
            (row, token)
            for row, point in enumerate(points)
            if point.answer_length < point.sampling.min_tokens
            for token in point.sequence.task.ends
        ]
        if forbidden:
            rows, tokens = zip(*forbidden, strict=True)
            logits[list(rows), list(tokens)] = -torch.inf
        return logits

    def _logprob_source(self, points: list[Point], logits: Tensor) -> tuple[list[int], Tensor]:
        """The raw logits of the rows that want log-probabilities, kept before anything shapes them."""
        rows = [row for row, point in enumerate(points) if point.sampling.logprobs is not None]
        return rows, logits[rows].clone() if rows else logits[:0]

    def _logprobs(
        self, points: list[Point], source: tuple[list[int], Tensor], tokens: Tensor
    ) -> list[TokenLogprob | None]:
        rows, raw = source
        found: list[TokenLogprob | None] = [None] * len(points)
        if not rows:
            return found
        tops = [points[row].sampling.logprobs or 0 for row in rows]
        widest = min(max(tops), self.vocabulary)
        own, values, ids = (part.tolist() for part in self.kernels.logprobs(raw, tokens[rows], widest))
        for index, (row, top) in enumerate(zip(rows, tops, strict=True)):
            best = tuple(zip(ids[index][:top], values[index][:top], strict=True))
            found[row] = TokenLogprob(int(tokens[row]), own[index], best)
        return found


def choice_scores(points: list[Point], logits: Tensor) -> dict[int, tuple[float, ...]]:
    """By row at a node of a choice trie: the model's log-probabilities of what is wanted there."""
    found = {}
    for row, point in enumerate(points):
        task = point.sequence.task
        if task.trie is not None:
            scores = torch.log_softmax(logits[row], -1)
            ends = scores[sorted(task.ends)].logsumexp(0)
            wanted = task.trie.wanted[point.sequence.sample]
            found[row] = tuple(float(ends if token == END else scores[token]) for token in wanted)
    return found


def filters(points: list[Point], device: torch.device) -> Filters:
    sampling = [point.sampling for point in points]
    keys = noise_key(
        np.array([one.seed for one in sampling]),
        np.array([point.sequence.task.request.key for point in points]),
        np.array([point.sequence.sample for point in points]),
        np.array([point.answer_length for point in points]),
    )
    return Filters(
        temperature=torch.tensor([one.temperature for one in sampling], dtype=torch.float32, device=device),
        top_k=torch.tensor([one.top_k for one in sampling], dtype=torch.int64, device=device),
        top_p=torch.tensor([one.top_p for one in sampling], dtype=torch.float32, device=device),
        min_p=torch.tensor([one.min_p for one in sampling], dtype=torch.float32, device=device),
        noise_keys=torch.from_numpy(keys).to(device),
    )


def penalties(points: list[Point], device: torch.device) -> Penalties:
    """The token counts of the rows that look back; the others carry neutral factors and no entries."""
    sampling = [point.sampling for point in points]
    counts = [point.counts for point in points]
    tokens = [one.tokens() for one in counts]
    rows = np.repeat(np.arange(len(points)), [len(distinct) for distinct in tokens])
    in_answer = np.concatenate([one.in_answer() for one in counts])
    return Penalties(
        rows=torch.from_numpy(rows).to(device),
        tokens=torch.from_numpy(np.concatenate(tokens)).to(device),
        answer_counts=torch.from_numpy(in_answer).to(device),
        repetition=torch.tensor([one.repetition_penalty for one in sampling], dtype=torch.float32, device=device),
        presence=torch.tensor([one.presence_penalty for one in sampling], dtype=torch.float32, device=device),
        frequency=torch.tensor([one.frequency_penalty for one in sampling], dtype=torch.float32, device=device),
    )
