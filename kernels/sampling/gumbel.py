"""Gumbel noise of vocabulary entries from a key, in 32-bit integer arithmetic: the device's side of the contract.

Knows one draw's key and token ids; knows nothing of seeds, rows or logits.
"""

import torch
from torch import Tensor

_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - 2**32  # as a signed word


def premix(tokens: Tensor) -> Tensor:
    """lowbias32 of token ids, as int32 words: the part of the hash that does not depend on the key."""
    return _lowbias32(tokens.to(torch.int32, copy=True))


def noise(keys: Tensor, premixed: Tensor) -> Tensor:
    """Gumbel noise float32 for keys [..., 2] int64; the premixed ids, int32, broadcast against keys [..., 0]."""
    words = keys.to(torch.int32)
    bits = premixed ^ words[..., 0]
    bits = _lowbias32(bits.add_(words[..., 1]))
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _lowbias32(bits: Tensor) -> Tensor:
    """The 32-bit mixer lowbias32 in place: multiplications wrap, shifts bring in zeros."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= _FIRST
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _SECOND
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits
