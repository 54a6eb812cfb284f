"""The literal table of what `engine.speculation` can be."""

from collections.abc import Callable

from ..statistics import Statistics
from .controller import Controller
from .ngram import NgramDrafter
from .speculation import NO_SPECULATION, Drafter, Drafting, Eager, Policy, Speculation
from .suffix import SuffixDrafter

KINDS: dict[str, tuple[Callable[[], Drafter], Callable[[], Policy]]] = {
    "ngram": (NgramDrafter, Eager),
    "suffix": (SuffixDrafter, Eager),
    "auto": (SuffixDrafter, Controller),
}


def new_speculation(kind: str, vocabulary: int, statistics: Statistics) -> Speculation:
    """The speculation of one run; `vocabulary` is the number of legal token ids."""
    if kind == "off":
        return NO_SPECULATION
    drafter, policy = KINDS[kind]
    return Drafting(drafter(), policy(), vocabulary, statistics)
