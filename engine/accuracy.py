"""How far a number format moves a model: both see the same tokens, and their next-token distributions are compared.

Knows decoders and token ids; which format is taken because of these numbers is decided elsewhere.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels import Kernels
from ..kernels.attention import AttentionItems
from .batch import Batch
from .blocks import common_length
from .kv import KVPages, KVShape
from .runner import Model

BLOCK_SIZE = 16
TIE = 0.05  # logits closer than this do not count as a changed choice
TOKENS_AT_ONCE = 1024  # fed to a model
LOGITS_BYTES = 32 * 2**20  # of one model held at once; comparing takes some times as much


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


class PlacedModel(Model, Protocol):
    """A model that lies on one device."""

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in one number format: its decoder, the ops it runs on, and how its keys and values are kept."""

    model: PlacedModel
    kernels: Kernels
    kv_shape: KVShape


@dataclass(frozen=True, slots=True)
class Trace:
    """What a model made of texts: of each the first position computed, the hidden states [n, H] from there on.

    `logits`: the head that reads them. Without it the model itself need not stay in memory.
    """

    starts: tuple[int, ...]
    hidden: tuple[Tensor, ...]
    logits: Callable[[Tensor], Tensor]


def compare(reference: Candidate, candidate: Candidate, texts: Sequence[Sequence[int]], vocabulary: int) -> Accuracy:
    """Feeds each text to both and compares what they predict for its every token but the first.

    `vocabulary`: ids below it are legal; the others are left out of the distributions. Raises ValueError when no text
    has two tokens.
    """
    texts = [text for text in texts if len(text) > 1]
    return difference(trace(reference, texts), trace(candidate, texts), texts, vocabulary)


@torch.inference_mode()
def trace(candidate: Candidate, texts: Sequence[Sequence[int]]) -> Trace:
    """Feeds texts of two tokens at least to a model, what they share with the first one only once."""
    choices = [candidate.model.rope_choice(len(text)) for text in texts]
    starts = tuple(
        _shared(texts[0], text) if index and choice == choices[0] else 0
        for index, (text, choice) in enumerate(zip(texts, choices, strict=True))
    )
    sizes = [_blocks(len(text)) - start // BLOCK_SIZE for text, start in zip(texts, starts, strict=True)]
    device = candidate.model.device
    pages = KVPages(candidate.kv_shape, sum(sizes[:1]) + max(sizes[1:], default=0), BLOCK_SIZE, device)
    tables = [
        np.concatenate([np.arange(start // BLOCK_SIZE), np.arange(size) + (sizes[0] if index else 0)])
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    hidden = tuple(
        torch.cat(list(_pieces(candidate, text, start, table, pages)))
        for text, start, table in zip(texts, starts, tables, strict=True)
    )
    return Trace(starts, hidden, candidate.model.logits)


def difference(reference: Trace, candidate: Trace, texts: Sequence[Sequence[int]], vocabulary: int) -> Accuracy:
    """Compares two traces of the same texts."""
    return differences(reference, candidate, texts, vocabulary, [0] * len(texts))[0]


@torch.inference_mode()
def differences(
    reference: Trace, candidate: Trace, texts: Sequence[Sequence[int]], vocabulary: int, first: Sequence[int]
) -> tuple[Accuracy, Accuracy]:
    """Compares two traces of the same texts: over all their tokens, and over those of a text from `first` on.

    Raises ValueError where there is no such token.
    """
    sums = np.zeros((2, 5))
    step = max(1, LOGITS_BYTES // (4 * vocabulary))
    for index, (text, start) in enumerate(zip(texts, reference.starts, strict=True)):
        for at in range(0, len(text) - start - 1, step):
            rows = slice(at, min(at + step, len(text) - start - 1))
            targets = torch.tensor(list(text[start + rows.start + 1 : start + rows.stop + 1]))
            left, right = (trace.logits(trace.hidden[index][rows])[:, :vocabulary] for trace in (reference, candidate))
            parts = _compare_logits(left, right, targets.to(left.device))
            sums[0] += parts.sum(0)
            sums[1] += parts[max(0, first[index] - start - rows.start - 1) :].sum(0)
    if not sums[:, 0].all():
        raise ValueError("the texts hold no token to predict; give longer ones")
    whole, late = (Accuracy(int(of[0]), *(float(mean) for mean in of[1:] / of[0])) for of in sums)
    return whole, late


def _compare_logits(left: Tensor, right: Tensor, targets: Tensor) -> np.ndarray:
    """[n, 5] of n tokens: 1, reference loss, candidate loss, divergence, agreement."""
    left_log, right_log = torch.log_softmax(left, -1), torch.log_softmax(right, -1)
    rows = targets.unsqueeze(1)
    divergence = (left_log.exp() * (left_log - right_log)).sum(-1)
    best = left.max(-1).values
    of_candidate = left.gather(1, right.argmax(-1, keepdim=True)).squeeze(1)
    parts = (
        torch.ones_like(best),
        -left_log.gather(1, rows).squeeze(1),
        -right_log.gather(1, rows).squeeze(1),
        divergence,
        (best - of_candidate < TIE).float(),
    )
    return torch.stack(parts, 1).double().cpu().numpy()


def _blocks(length: int) -> int:
    return -(-length // BLOCK_SIZE)


def _shared(first: Sequence[int], text: Sequence[int]) -> int:
    """Whole blocks of tokens that a text begins with like the first one, and does not end with."""
    most = min(len(first), len(text) - 2)
    return min(common_length(first, text), most) // BLOCK_SIZE * BLOCK_SIZE


def _pieces(
    candidate: Candidate, text: Sequence[int], start: int, table: np.ndarray, pages: KVPages
) -> Iterator[Tensor]:
    """Hidden states [n, H] of the text from `start` on, block i of it in page table[i]."""
    for at in range(start, len(text), TOKENS_AT_ONCE):
        piece = text[at : at + TOKENS_AT_ONCE]
        yield candidate.model.forward(_batch(candidate, piece, at, len(text), table), pages)


def _batch(candidate: Candidate, piece: Sequence[int], start: int, length: int, table: np.ndarray) -> Batch:
    """A step that feeds one piece of one text and wants hidden states everywhere."""
    end = start + len(piece)
    positions = np.arange(start, end)
    items = AttentionItems(
        start=np.array([0]),
        length=np.array([end]),
        block_offset=np.array([0, _blocks(end)]),
        blocks=table[: _blocks(end)],
        query_offset=np.array([0, len(piece)]),
        queries=np.arange(len(piece)),
        positions=positions,
    )
    choice, device = candidate.model.rope_choice(length), candidate.model.device
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return Batch(
        tokens=torch.tensor(list(piece), device=device),
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        rope_choice=torch.full((len(piece),), choice, device=device),
        attention=candidate.kernels.plan_attention(items, BLOCK_SIZE),
        sampled=torch.arange(len(piece), device=device),
    )
