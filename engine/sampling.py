"""From a step's logits to what each sequence draws: masks, penalties, filters, log-probabilities, faults.

Turns sampling parameters of sequences into the tensors of the sampling kernels; the arithmetic is theirs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import Kernels
from ..kernels.sampling import Filters, Penalties
from ..kernels.sampling.noise import noise_key
from .intake import penalised
from .request import RowError, TokenLogprob
from .sequence import Drawn, Sequence

NOT_FINITE = RowError("numeric", "generate", "the model's logits hold NaN or infinity", retryable=False)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws the next token of every sequence of a batch; a row's draw never depends on its neighbours."""

    kernels: Kernels
    vocabulary: int  # token ids of the tokenizer; the head may be wider

    def draw(self, sequences: list[Sequence], logits: Tensor) -> list[Drawn]:
        """One result per row of `logits` [R, V] float32, which is used up."""
        finite = self.kernels.finite(logits[:, : self.vocabulary]).tolist()
        logits[:, self.vocabulary :] = -torch.inf
        entries = self._logprob_source(sequences, logits)
        logits = self._shape(sequences, logits)
        tokens = self.kernels.sample(logits, filters(sequences, logits.device))
        logprobs = self._logprobs(sequences, entries, tokens)
        return [
            Drawn(token, logprob) if fine else Drawn(error=NOT_FINITE)
            for token, logprob, fine in zip(tokens.tolist(), logprobs, finite, strict=True)
        ]

    def _shape(self, sequences: list[Sequence], logits: Tensor) -> Tensor:
        """Penalties, then the end tokens that min_tokens forbids."""
        if any(penalised(sequence.task.request.sampling) for sequence in sequences):
            logits = self.kernels.penalise(logits, penalties(sequences, logits.device))
        forbidden = [
            (row, token)
            for row, sequence in enumerate(sequences)
            if sequence.answer_length < sequence.task.request.sampling.min_tokens
            for token in sequence.task.ends
        ]
        if forbidden:
            rows, tokens = zip(*forbidden, strict=True)
            logits[list(rows), list(tokens)] = -torch.inf
        return logits

    def _logprob_source(self, sequences: list[Sequence], logits: Tensor) -> tuple[list[int], Tensor]:
        """The raw logits of the rows that want log-probabilities, kept before anything shapes them."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.task.request.sampling.logprobs is not None]
        return rows, logits[rows].clone() if rows else logits[:0]

    def _logprobs(
        self, sequences: list[Sequence], source: tuple[list[int], Tensor], tokens: Tensor
    ) -> list[TokenLogprob | None]:
        rows, raw = source
        found: list[TokenLogprob | None] = [None] * len(sequences)
        if not rows:
            return found
        tops = [sequences[row].task.request.sampling.logprobs or 0 for row in rows]
        widest = min(max(tops), self.vocabulary)
        own, values, ids = (part.tolist() for part in self.kernels.logprobs(raw, tokens[rows], widest))
        for index, (row, top) in enumerate(zip(rows, tops, strict=True)):
            best = tuple(zip(ids[index][:top], values[index][:top], strict=True))
            found[row] = TokenLogprob(int(tokens[row]), own[index], best)
        return found


def filters(sequences: list[Sequence], device: torch.device) -> Filters:
    sampling = [sequence.task.request.sampling for sequence in sequences]
    keys = noise_key(
        np.array([one.seed for one in sampling]),
        np.array([sequence.task.request.key for sequence in sequences]),
        np.array([sequence.sample for sequence in sequences]),
        np.array([sequence.answer_length for sequence in sequences]),
    )
    return Filters(
        temperature=torch.tensor([one.temperature for one in sampling], dtype=torch.float32, device=device),
        top_k=torch.tensor([one.top_k for one in sampling], dtype=torch.int64, device=device),
        top_p=torch.tensor([one.top_p for one in sampling], dtype=torch.float32, device=device),
        min_p=torch.tensor([one.min_p for one in sampling], dtype=torch.float32, device=device),
        noise_keys=torch.from_numpy(keys).to(device),
    )


def penalties(sequences: list[Sequence], device: torch.device) -> Penalties:
    """The token counts of the rows that look back; the others carry neutral factors and no entries."""
    sampling = [sequence.task.request.sampling for sequence in sequences]
    tokens = [sequence.counts.tokens() for sequence in sequences]
    rows = np.repeat(np.arange(len(sequences)), [len(distinct) for distinct in tokens])
    in_answer = np.concatenate([sequence.counts.in_answer() for sequence in sequences])
    return Penalties(
        rows=torch.from_numpy(rows).to(device),
        tokens=torch.from_numpy(np.concatenate(tokens)).to(device),
        answer_counts=torch.from_numpy(in_answer).to(device),
        repetition=torch.tensor([one.repetition_penalty for one in sampling], dtype=torch.float32, device=device),
        presence=torch.tensor([one.presence_penalty for one in sampling], dtype=torch.float32, device=device),
        frequency=torch.tensor([one.frequency_penalty for one in sampling], dtype=torch.float32, device=device),
    )
