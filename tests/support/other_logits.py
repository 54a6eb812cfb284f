"""A model whose logits are others than its own, whoever looks at them."""

from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.engine import Engine
from batchgen.kernels.draw import DrawnLinear
from batchgen.kernels.draw.reference import draw as draw_from
from batchgen.kernels.sampling import Filters


def change_logits(engine: Engine, change: Callable[[Tensor], Tensor]) -> None:
    """From now on the engine draws from what `change` makes of the logits [R, V]."""
    own = engine.model.head().logits

    def logits(hidden: Tensor) -> Tensor:
        return change(own(hidden))

    def draw(hidden: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        return draw_from(
            engine._runner.kernels, hidden, DrawnLinear(logits, None, None, torch.float32, vocabulary), filters
        )

    engine.model.logits, engine.model.draw = logits, draw
