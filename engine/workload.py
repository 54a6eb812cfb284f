"""A whole collection of requests: the order they run in, and what that says about how many to run at once.

Knows prompts and how long answers may get; when a request is admitted is decided elsewhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .backlog import UNKNOWN_BACKLOG, Backlog, KnownBacklog
from .draft.times import RIDGE
from .forecast import is_certain
from .intake import RowLimits, refusal
from .plan import plan
from .request import Request
from .tail import limit_pays, longest_first


def arrange(requests: Iterable[Request], limits: RowLimits, most: int) -> tuple[list[Request], Backlog]:
    """All requests in the order to run them, and what is to come of them when `most` may run at once.

    Depth first through the tree of prompts, longer answers first in every branch. What is refused comes last, with its
    error: it costs nothing.
    """
    refused: list[Request] = []
    good: list[Request] = []
    for request in requests:
        error = refusal(request, limits)
        if error is None:
            good.append(request)
        else:
            refused.append(request if request.error else replace(request, error=error))
    planned = plan([request.prompt for request in good])
    order = planned.order.tolist()
    lengths = [good[index].sampling.max_tokens for index in order]
    if len(set(lengths)) > 1:
        order = [order[place] for place in longest_first(planned.common.tolist(), lengths)]
    ordered = [good[index] for index in order]
    return [*ordered, *refused], _backlog(ordered, most)


def _backlog(ordered: Sequence[Request], most: int) -> Backlog:
    """Known where all lengths are certain, and running fewer at once for it pays."""
    lengths = [request.sampling.max_tokens for request in ordered for _ in range(request.sampling.n)]
    if all(is_certain(request.sampling) for request in ordered) and limit_pays(lengths, most, RIDGE):
        return KnownBacklog([request.sampling for request in ordered])
    return UNKNOWN_BACKLOG
