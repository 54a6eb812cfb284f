"""A linear and draws from its outputs, which nobody else looks at: the contract.

    logits = head.product(x), without the ids from head.vocabulary on
    draw(x, head, filters) = sample(logits, filters), finite(logits)

x        [R, H]  float32 or bfloat16
filters  of R rows, all with neutral top_k, top_p and min_p; see kernels/sampling
out      token ids [R] int64 and [R] bool, new; the same, bit for bit, as if the logits had been kept

A table that need not keep the logits writes none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawnLinear:
    """A linear of a table, whose outputs are logits."""

    product: "Callable[[Tensor], Tensor]"  # [R, H] -> [R, O], new, by the op of the table
    weight: Any  # what that op multiplies by, as the table packed it
    bias: "Tensor | None"  # [O] float32
    dtype: "torch.dtype"  # of the outputs
    vocabulary: int  # ids that may be drawn, the first ones
