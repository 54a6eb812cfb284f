"""How far a number format moves a model: both see the same tokens, and their next-token distributions are compared.

Knows decoders and token ids; which format is taken because of these numbers is decided elsewhere.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import Kernels
from ..kernels.attention import AttentionItems
from .batch import Batch
from .kv import KVPages, KVShape
from .runner import Model

BLOCK_SIZE = 16
TIE = 0.05  # logits closer than this do not count as a changed choice
TOKENS_AT_ONCE = 1024  # bounds the logits held: 4 bytes times the vocabulary for each


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A candidate beside its reference over `tokens` predicted tokens; losses in nat per token."""

    tokens: int
    reference_loss: float
    candidate_loss: float
    divergence: float  # mean Kullback-Leibler divergence of the candidate from the reference, nat
    agreement: float  # share of tokens with the same most likely choice, ties within TIE not counted as changed

    @property
    def perplexity(self) -> float:
        return math.exp(self.candidate_loss)

    @property
    def reference_perplexity(self) -> float:
        return math.exp(self.reference_loss)

    @property
    def perplexity_rise(self) -> float:
        """Share by which the perplexity is higher than the reference's; negative when it is lower."""
        return math.expm1(self.candidate_loss - self.reference_loss)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in one number format: its decoder, the ops it runs on, and how its keys and values are kept."""

    model: Model
    kernels: Kernels
    kv_shape: KVShape


@torch.inference_mode()
def compare(reference: Candidate, candidate: Candidate, texts: Iterable[Sequence[int]], vocabulary: int) -> Accuracy:
    """Feeds each text to both and compares what they predict for its every token but the first.

    `vocabulary`: ids below it are legal; the others are left out of the distributions. Raises ValueError when no text
    has two tokens.
    """
    sums = np.zeros(5)
    for tokens in texts:
        if len(tokens) < 2:
            continue
        pairs = zip(_logits(reference, tokens), _logits(candidate, tokens), strict=True)
        for (start, left), (_, right) in pairs:
            targets = torch.tensor(list(tokens[start + 1 : start + 1 + len(left)]))
            count = len(targets)
            sums += _compare_logits(left[:count, :vocabulary], right[:count, :vocabulary], targets)
    if not sums[0]:
        raise ValueError("the texts hold no token to predict; give longer ones")
    total, means = int(sums[0]), sums[1:] / sums[0]
    return Accuracy(total, *(float(mean) for mean in means))


def _compare_logits(left: Tensor, right: Tensor, targets: Tensor) -> np.ndarray:
    """Count, sum of reference losses, of candidate losses, of divergences, of agreements."""
    left_log, right_log = torch.log_softmax(left, -1), torch.log_softmax(right, -1)
    rows = targets.unsqueeze(1)
    divergence = (left_log.exp() * (left_log - right_log)).sum(-1)
    best = left.max(-1).values
    of_candidate = left.gather(1, right.argmax(-1, keepdim=True)).squeeze(1)
    parts = (
        -left_log.gather(1, rows),
        -right_log.gather(1, rows),
        divergence,
        (best - of_candidate < TIE).float(),
    )
    return np.array([len(targets), *(float(part.double().sum()) for part in parts)])


def _logits(candidate: Candidate, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Pieces of the text: position of the first token, and the logits [n, V] behind each token of the piece."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    pages = KVPages(candidate.kv_shape, num_blocks, BLOCK_SIZE, torch.device("cpu"))
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        piece = tokens[start : start + TOKENS_AT_ONCE]
        hidden = candidate.model.forward(_batch(candidate, piece, start, len(tokens)), pages)
        yield start, candidate.model.logits(hidden)


def _batch(candidate: Candidate, piece: Sequence[int], start: int, length: int) -> Batch:
    """A step that feeds one piece of one text and wants logits everywhere; block i holds tokens from i * BLOCK_SIZE."""
    end = start + len(piece)
    positions = np.arange(start, end)
    num_blocks = -(-end // BLOCK_SIZE)
    items = AttentionItems(
        start=np.array([0]),
        length=np.array([end]),
        block_offset=np.array([0, num_blocks]),
        blocks=np.arange(num_blocks),
        query_offset=np.array([0, len(piece)]),
        queries=np.arange(len(piece)),
        positions=positions,
    )
    choice = candidate.model.rope_choice(length)
    return Batch(
        tokens=torch.tensor(list(piece)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(positions),
        rope_choice=torch.full((len(piece),), choice),
        attention=candidate.kernels.plan_attention(items, BLOCK_SIZE),
        sampled=torch.arange(len(piece)),
    )
