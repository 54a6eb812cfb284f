"""Sampling in plain PyTorch. Knows logits, filters and noise keys; knows nothing of requests or grammars."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import Filters, Penalties
from .gumbel import noise, premix

SCRATCH_ELEMENTS = 2**21  # of one temporary; the handful alive at once stays within 64 MB
NOISE_ELEMENTS = 2**18  # noise of whole rows is made in pieces that stay near the cores
RANKS = (64, 1024)  # how many of the best logits the survivors of a filter are looked for in, before all are sorted


def finite(logits: Tensor) -> Tensor:
    """[R] bool: the best logit of the row is a number; see the contract."""
    return logits.amax(-1).isfinite()


def penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """New logits [R, V] with repetition, presence and frequency penalties applied; see the contract."""
    rows, tokens, counts = penalties.rows, penalties.tokens, penalties.answer_counts
    values = logits[rows, tokens]
    repetition = penalties.repetition[rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= penalties.presence[rows] * (counts > 0) + penalties.frequency[rows] * counts
    return logits.index_put((rows, tokens), values)


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of the tokens [R], the top values [R, top] and their ids [R, top]; see the contract."""
    size = _rows_within(SCRATCH_ELEMENTS, logits.shape[1])
    starts = range(0, max(1, len(logits)), size)
    parts = [_logprobs(logits[start : start + size], tokens[start : start + size], top) for start in starts]
    own, values, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return own, values, ids


def _logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.log_softmax(logits, -1)
    own = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    if not top or not len(logits):
        return own, scores[:, :top], tokens.new_empty(len(tokens), top)
    ids, _ = _ranked(logits, top)
    ids = ids[:, :top]
    return own, scores.gather(1, ids), ids


def sample(logits: Tensor, filters: Filters) -> Tensor:
    """Token ids [R] int64, one per row; see the contract."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    greedy, filtered = filters.temperature == 0, filtered_rows(filters)
    _by_rows(_draw_best, greedy, SCRATCH_ELEMENTS, logits, filters, out)
    draw_filtered_rows(filtered, logits, filters, out)
    _by_rows(_draw_any, ~(greedy | filtered), NOISE_ELEMENTS, logits, filters, out)
    return out


def filtered_rows(filters: Filters) -> Tensor:
    """[R] bool: the rows that draw from a part of their distribution."""
    cut = (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
    return (filters.temperature > 0) & cut


def draw_filtered_rows(filtered: Tensor, logits: Tensor, filters: Filters, out: Tensor) -> None:
    """Writes the tokens of the rows [R] named by `filtered` to out [R]."""
    _by_rows(_draw_filtered, filtered, SCRATCH_ELEMENTS, logits, filters, out)


def _by_rows(
    draw: Callable[[Tensor, Filters], Tensor],
    chosen: Tensor,
    elements: int,
    logits: Tensor,
    filters: Filters,
    out: Tensor,
) -> None:
    """Draws the chosen rows in pieces of bounded size. A row's draw never looks at another row."""
    numbers = chosen.nonzero().squeeze(1)
    size = _rows_within(elements, logits.shape[1])
    for start in range(0, len(numbers), size):
        rows = numbers[start : start + size]
        out[rows] = draw(_rows(logits, rows), take_rows(filters, rows))


def _rows(logits: Tensor, rows: Tensor) -> Tensor:
    """The given rows, ascending; a view where they are neighbours."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return logits[first:end] if end - first == len(rows) else logits.index_select(0, rows)


def _rows_within(elements: int, vocabulary: int) -> int:
    return max(1, elements // vocabulary)


def take_rows(filters: Filters, rows: Tensor) -> Filters:
    fields = (filters.temperature, filters.top_k, filters.top_p, filters.min_p, filters.noise_keys)
    return Filters(*(field.index_select(0, rows) for field in fields))


def _draw_best(logits: Tensor, filters: Filters) -> Tensor:
    return logits.argmax(-1)


def _draw_any(logits: Tensor, filters: Filters) -> Tensor:
    """One draw of each row [r, V] from its whole distribution."""
    gumbel = noise(filters.noise_keys.unsqueeze(1), premix(torch.arange(logits.shape[1], device=logits.device)))
    return gumbel.add_(logits / filters.temperature.unsqueeze(1)).argmax(-1)


def _draw_filtered(logits: Tensor, filters: Filters) -> Tensor:
    """One draw of each row [r, V] from what top-k, top-p and min-p leave of it."""
    scaled = logits / filters.temperature.unsqueeze(1)
    probabilities = torch.softmax(scaled, -1)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    left = torch.arange(len(logits), device=logits.device)
    for rank in (*(rank for rank in RANKS if rank < logits.shape[1]), logits.shape[1]):
        tokens, covered = _draw_among(scaled, probabilities, filters, rank)
        out[left[covered]] = tokens[covered]
        rows = (~covered).nonzero().squeeze(1)
        if not len(rows):
            break
        left, scaled, probabilities, filters = left[rows], scaled[rows], probabilities[rows], take_rows(filters, rows)
    return out


def _draw_among(scaled: Tensor, probabilities: Tensor, filters: Filters, rank: int) -> tuple[Tensor, Tensor]:
    """Draws from the survivors among the `rank` best of each row; second, whether all survivors are among them."""
    ids, real = _ranked(scaled, rank)
    chances = probabilities.gather(1, ids) * real
    kept, covered = _survivors(chances, real, filters)
    covered |= rank >= scaled.shape[1]
    kept = kept[:, : max(1, int(kept.sum(-1).max()))]
    ids = ids[:, : kept.shape[1]]
    scores = scaled.gather(1, ids) + noise(filters.noise_keys.unsqueeze(1), premix(ids))
    scores = scores.masked_fill_(~kept, -torch.inf)
    best = scores == scores.amax(-1, keepdim=True)
    return torch.where(best, ids, scaled.shape[1] - 1).amin(-1), covered


def _survivors(chances: Tensor, real: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Which of the candidates [r, w], best first, pass the filters, and whether no later one could."""
    place = torch.arange(chances.shape[1], device=chances.device)
    reached = chances.cumsum(-1)
    top_k, top_p, min_p = filters.top_k.unsqueeze(1), filters.top_p.unsqueeze(1), filters.min_p.unsqueeze(1)
    limit = torch.where(top_k > 0, top_k, torch.iinfo(torch.int64).max)
    whole = torch.where(top_k > 0, reached.gather(1, (top_k - 1).clamp(0, len(place) - 1)), 1.0)
    within = reached - chances < top_p * whole
    kept = real & (place < limit) & (within | (top_p >= 1)) & (chances >= min_p * chances[:, :1])
    kept[:, 0] = True
    count = real.sum(-1, keepdim=True)
    last = chances.gather(1, (count - 1).clamp(min=0))
    enough = ((top_p < 1) & (reached[:, -1:] >= top_p)) | (last < min_p * chances[:, :1])
    return kept, torch.where(top_k > 0, count >= top_k, enough).squeeze(1)


def _ranked(logits: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Ids [r, w] of the `rank` best of each row and of all that equal the last; second, which of them are real.

    Best first, lowest id first among equals; shorter rows are filled up with id 0. Needs at least one row.
    """
    if rank >= logits.shape[1]:
        ids = logits.sort(dim=-1, descending=True, stable=True).indices
        return ids, torch.ones_like(ids, dtype=torch.bool)
    rows, tokens = (logits >= logits.topk(rank, -1).values[:, -1:]).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(logits))
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(logits), max(rank, int(counts.max())))
    ids = tokens.new_zeros(shape)
    ids[rows, place] = tokens
    values = logits.new_full(shape, -torch.inf)
    values[rows, place] = logits[rows, tokens]
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order), (torch.arange(shape[1], device=rows.device) < counts.unsqueeze(1))
