"""Rotary encoding in plain PyTorch. Knows how pairs lie in a head, not where angles come from."""

import torch
from torch import Tensor


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Query [T, Q, D] and key [T, K, D] turned by the angles of their tokens; see the contract."""
    cos, sin = cos.to(query.dtype).unsqueeze(1), sin.to(query.dtype).unsqueeze(1)
    return _turn(query, cos, sin), _turn(key, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
