"""Which answers hold up the end of a run: with nothing left to take their place, only the last to end decides.

Knows how many tokens answers may still get, and whether they will get them.
"""

import math

from ..forecast import is_certain
from ..sequence import Sequence, Step
from .speculation import tokens_left

SPREAD = 0.1875  # of the tokens that the longest still needs: how far answers drift apart, drafts helping some


def chances_to_be_last(step: Step) -> list[float]:
    """For each feed's sequence the chance to end last; the mean where its place is taken by another, or nobody knows.

    A step spends the same for all its sequences, and it is spent until the last has ended: a token that one gets early
    saves this chance of a step. With errors of a Gumbel distribution in how long each takes it is the softmax.
    """
    sequences = [feed.sequence for feed in step.feeds]
    if not step.draining or not all(map(has_certain_end, sequences)):
        return [1 / len(sequences)] * len(sequences)
    left = list(map(tokens_left, sequences))
    longest = max(left)
    spread = max(1.0, SPREAD * longest)
    weights = [math.exp((tokens - longest) / spread) for tokens in left]
    total = sum(weights)
    return [weight / total for weight in weights]


def has_certain_end(sequence: Sequence) -> bool:
    return is_certain(sequence.task.request.sampling)
