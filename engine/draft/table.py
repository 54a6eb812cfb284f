"""The literal table of what `engine.speculation` can be.

Puts drafters and policies together; models are handed in ready to run, so that nothing here knows a tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..statistics import Statistics
from .ahead import Execute
from .controller import Controller
from .layer_skip import LayerSkipDrafter
from .medusa import Heads, MedusaDrafter
from .model import ModelDrafter
from .ngram import NgramDrafter
from .speculation import NO_SPECULATION, Drafter, Drafting, Eager, Policy, Speculation
from .suffix import SuffixDrafter


@dataclass(frozen=True, slots=True)
class DraftModels:
    """What drafters that run a model may run: exits of the target by their layers, a model of its own, heads."""

    num_layers: int
    exits: Mapping[int, Execute]
    model: Execute | None = None
    num_tokens: int = 0
    context: int = 0
    heads: Heads | None = None

    def reset(self) -> None:
        """A run begins, or is over: nothing of another one is kept."""
        for model in (*self.exits.values(), self.model, self.heads):
            if model is not None:
                model.reset()


def _model_drafter(models: DraftModels) -> ModelDrafter:
    assert models.model is not None
    return ModelDrafter(models.model, models.num_tokens, models.context)


def _medusa_drafter(models: DraftModels) -> MedusaDrafter:
    assert models.heads is not None
    return MedusaDrafter(models.heads)


KINDS: dict[str, Callable[[DraftModels], Drafter]] = {
    "ngram": lambda models: NgramDrafter(),
    "suffix": lambda models: SuffixDrafter(),
    "auto": lambda models: SuffixDrafter(),
    "layer_skip": lambda models: LayerSkipDrafter(models.exits, models.num_layers),
    "draft": _model_drafter,
    "medusa": _medusa_drafter,
    "mtp": _model_drafter,
}
POLICIES: dict[str, Callable[[], Policy]] = {"always": Eager, "auto": Controller}


def new_speculation(
    kind: str, policy: str, models: DraftModels, vocabulary: int, statistics: Statistics
) -> Speculation:
    """The speculation of one run; `vocabulary` is the number of legal token ids."""
    if kind == "off":
        return NO_SPECULATION
    return Drafting(KINDS[kind](models), POLICIES[policy](), vocabulary, statistics)
