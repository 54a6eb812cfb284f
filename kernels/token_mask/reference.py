"""The token mask in plain PyTorch. Knows bits and logits; where the bits come from is not known here."""

import torch
from torch import Tensor


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Writes -inf where a bit is 0; see the contract."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(-1) >> places) & 1).bool().flatten(1)[:, : logits.shape[1]]
    forbidden = torch.ones(len(rows), logits.shape[1], dtype=torch.bool, device=logits.device)
    forbidden[:, : allowed.shape[1]] = ~allowed
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
