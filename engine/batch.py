"""The tensors of one step, complete when built."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A step laid out for the device. T tokens are fed, R of them yield logits."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, position of each token in its sequence
    slots: Tensor  # [T] int64, block * block_size + offset: where the token's key and value go
    rope_choice: Tensor  # [T] int64, which of the model's RoPE tables the token's row uses (0 unless length-dependent)
    attention: Any  # the kernels' attention plan
    sampled: Tensor  # [R] int64, indices into T
