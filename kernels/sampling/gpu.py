"""Sampling on a GPU: one program a row, no sort, nothing for the host to do. Knows launches, not the arithmetic."""

import torch
from torch import Tensor

from ..launch import Launch
from . import Filters, Penalties
from .gpu_kernels import (
    check_finite,
    draw_from_all,
    draw_from_candidates,
    gather_candidates,
    penalise_entries,
    rank_candidates,
)
from .gpu_rows import BLOCK, SEARCHED, WARPS, WAYS

MOST_CANDIDATES = 4096


def finite(logits: Tensor) -> Tensor:
    """[R] bool; see the contract."""
    logits = _rows(logits)
    out = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    plan_finite(logits, out).run()
    return out


def plan_finite(logits: Tensor, out: Tensor) -> Launch:
    """The launch for logits [R, V] and out [R]."""
    arguments = (logits, logits.stride(0), out, logits.shape[1])
    return Launch(check_finite, (len(logits),), arguments, {"BLOCK": BLOCK}, WARPS)


def penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """New logits [R, V] with the penalties applied; see the contract."""
    out = logits.clone(memory_format=torch.contiguous_format)
    plan_penalties(out, penalties).run()
    return out


def plan_penalties(logits: Tensor, penalties: Penalties) -> Launch:
    """The launch that changes the entries of logits [R, V] in place."""
    entries = (penalties.rows, penalties.tokens, penalties.answer_counts)
    by_row = (penalties.repetition, penalties.presence, penalties.frequency)
    size = len(penalties.rows)
    arguments = (logits, *entries, *by_row, logits.shape[1], size)
    return Launch(penalise_entries, (-(-size // 512),), arguments, {"BLOCK": 512})


def sample(logits: Tensor, filters: Filters) -> Tensor:
    """Token ids [R] int64, one per row; see the contract."""
    logits = _rows(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for launch in plan_sample(logits, filters, tokens):
        launch.run()
    return tokens


def plan_sample(logits: Tensor, filters: Filters, tokens: Tensor) -> list[Launch]:
    """The launches; a program whose row is another's ends at once."""
    rows, vocabulary = logits.shape
    kept = _scratch(rows, logits.device)
    cuts = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
    start, keys = (logits, logits.stride(0), *cuts), filters.noise_keys.contiguous()
    constants = {"MOST": MOST_CANDIDATES, "BLOCK": BLOCK}
    searching = {"MOST": MOST_CANDIDATES, "WAYS": WAYS, "SEARCHED": SEARCHED}
    return [
        Launch(draw_from_all, (rows,), (*start, keys, tokens, vocabulary), {"BLOCK": BLOCK}, WARPS),
        Launch(gather_candidates, (rows,), (*start, *kept, vocabulary), constants, WARPS),
        Launch(draw_from_candidates, (rows,), (*start, keys, *kept, tokens, vocabulary), searching, WARPS),
    ]


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of the tokens [R], the top values [R, top] and their ids [R, top]; see the contract."""
    logits = _rows(logits)
    own = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    values = own.new_empty(len(logits), top)
    ids = torch.empty((len(logits), top), dtype=torch.int64, device=logits.device)
    for launch in plan_logprobs(logits, tokens, own, values, ids):
        launch.run()
    return own, values, ids


def plan_logprobs(logits: Tensor, tokens: Tensor, own: Tensor, values: Tensor, ids: Tensor) -> list[Launch]:
    """The launches for logits [R, V], tokens and own [R], values and ids [R, top]."""
    (rows, vocabulary), top = logits.shape, values.shape[1]
    kept, ones = _scratch(rows, logits.device), torch.ones_like(own)
    wanted = torch.full_like(tokens, max(top, 1))
    cuts = (logits, logits.stride(0), ones, wanted, ones, torch.zeros_like(own))
    constants = {"MOST": MOST_CANDIDATES, "BLOCK": BLOCK}
    ranking = (logits, logits.stride(0), *kept, tokens, own, values, ids, top, vocabulary)
    return [
        Launch(gather_candidates, (rows,), (*cuts, *kept, vocabulary), constants, WARPS),
        Launch(rank_candidates, (rows,), ranking, constants, WARPS),
    ]


def _scratch(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Best, mass, floor and count of each row [R], values and ids of its candidates [R, MOST_CANDIDATES]."""
    best, mass = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    floor = torch.empty(rows, dtype=torch.int64, device=device)
    count = torch.empty(rows, dtype=torch.int32, device=device)
    values = torch.empty((rows, MOST_CANDIDATES), dtype=torch.float32, device=device)
    return best, mass, floor, count, values, torch.empty_like(values, dtype=torch.int32)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.shape[1] == 1 or logits.stride(1) == 1 else logits.contiguous()
