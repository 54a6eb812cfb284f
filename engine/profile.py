"""What kind of job it is, told by its first rows: how much they share, how long answers may get, what shapes them.

Knows requests and the plan of their prompts; no machine.
"""

from collections.abc import Sequence

import numpy as np

from .costs import Workload
from .forecast import PRIOR_SHARE, is_certain
from .grammar import Grammar
from .plan import plan
from .request import Request, Sampling

FORCED = {"json_schema": 0.4, "choices": 0.3}  # of an answer's tokens, by kind of grammar
NOTHING = Workload(rows=1, own=1.0, common=0.0, computed=1.0, answer=1.0, longest=2)
CHOICE_CHARACTERS = 3.5  # of a token of a choice


def workload_of(requests: Sequence[Request], rows: int) -> Workload:
    """The job of `rows` rows of which `requests` are the first that can be asked. Without any there is nothing to do.

    What all of them share counts once for the job, what some share once for those.
    """
    if not requests:
        return NOTHING
    planned = plan([request.prompt for request in requests])
    common, count = planned.common, len(requests)
    everywhere = int(common[1:].min()) if count > 1 else 0
    beside = np.maximum(common, np.append(common[1:], 0))
    lengths = np.array([len(request.prompt) for request in requests])
    shared = np.minimum(beside, lengths)
    samplings = [request.sampling for request in requests]
    return Workload(
        rows=max(rows, count),
        own=float((lengths - shared).mean()),
        common=float(shared.mean()),
        computed=max(1.0, (planned.distinct_tokens - everywhere) / count + everywhere / max(rows, count)),
        answer=float(np.mean([expected_answer(sampling) for sampling in samplings])),
        longest=max(len(request.prompt) + request.sampling.max_tokens for request in requests),
        samples=max(1 if sampling.greedy else sampling.n for sampling in samplings),
        forced=float(np.mean([forced_share(sampling) for sampling in samplings])),
        scored=all(sampling.choice_probs for sampling in samplings),
        certain=all(map(is_certain, samplings)),
    )


def expected_answer(sampling: Sampling) -> float:
    """Tokens of one answer: certain ones, those of a choice, else the share of max_tokens that forecasts start with."""
    if is_certain(sampling):
        return float(sampling.max_tokens)
    grammar = sampling.grammar
    if grammar is not None and grammar.kind == "choices":
        return min(float(sampling.max_tokens), choice_tokens(grammar))
    return max(1.0, sampling.max_tokens * PRIOR_SHARE)


def choice_tokens(grammar: Grammar) -> float:
    """About how many tokens a choice has."""
    texts = grammar.options
    return max(1.0, sum(map(len, texts)) / len(texts) / CHOICE_CHARACTERS)


def forced_share(sampling: Sampling) -> float:
    """Of an answer's tokens, how many a grammar is expected to know."""
    if sampling.grammar is None or sampling.logprobs is not None:
        return 0.0
    return FORCED.get(sampling.grammar.kind, 0.0)
