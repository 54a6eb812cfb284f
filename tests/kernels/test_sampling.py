"""Sampling beyond the cases: distributions, edges of the filters, and that a row never depends on its company."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from backends import each_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels import Kernels
from batchgen.kernels.sampling import Filters, cases, reference
from batchgen.kernels.sampling.noise import noise_key

DRAWS = 40_000
SIGMAS = 4.5
FIELDS = ("seed", "row", "sample", "token")


def draws(kernels: Kernels, logits: Tensor, varied: str, count: int = DRAWS, **values: list[float]) -> Tensor:
    """Tokens drawn from the same logits [V], one argument of the noise running."""
    chosen = cases.filters(count, **values)
    noise_keys = noise_key(*(np.arange(count) if name == varied else 3 for name in FIELDS))
    chosen.noise_keys.copy_(torch.from_numpy(noise_keys))
    return kernels.sample(logits.expand(count, -1).contiguous(), chosen)


def deviation(tokens: Tensor, chances: Tensor) -> float:
    """Chi-square of drawn tokens, in standard deviations above its mean. Ids without a chance must not occur."""
    observed = torch.bincount(tokens, minlength=len(chances)).double()
    possible = chances > 0
    assert observed[~possible].sum() == 0
    expected = chances[possible].double() * len(tokens)
    degrees = int(possible.sum()) - 1
    return float(((observed[possible] - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


LOGITS = torch.linspace(-2, 2, 60)[torch.randperm(60, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize("varied", FIELDS)
@each_backend
def test_draws_follow_the_softmax(kernels: Kernels, varied: str) -> None:
    assert abs(deviation(draws(kernels, LOGITS, varied), LOGITS.softmax(-1))) < SIGMAS


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": [0.5]},
        {"temperature": [3.0]},
        {"top_k": [7]},
        {"top_p": [0.7]},
        {"min_p": [0.2]},
        {"top_k": [30], "top_p": [0.8], "min_p": [0.1], "temperature": [1.5]},
    ],
    ids=str,
)
@each_backend
def test_filtered_draws_follow_the_renormalised_softmax(kernels: Kernels, values: dict[str, list[float]]) -> None:
    (temperature,), (top_k,), (top_p,), (min_p,) = (
        values.get(name, [neutral])
        for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    )
    kept = cases.survivors(LOGITS, temperature, int(top_k), top_p, min_p)
    chances = torch.zeros(60)
    chances[kept] = (LOGITS[kept] / temperature).softmax(-1)
    assert abs(deviation(draws(kernels, LOGITS, "row", **values), chances)) < SIGMAS


@pytest.mark.parametrize("varied", FIELDS)
@each_backend
def test_neighbouring_draws_are_independent(kernels: Kernels, varied: str) -> None:
    """Pairs of draws k apart fill the table of pairs evenly."""
    tokens = draws(kernels, torch.zeros(8), varied)
    for apart in (1, 2, 64):
        pairs = tokens[apart:] * 8 + tokens[:-apart]
        assert abs(deviation(pairs, torch.full((64,), 1 / 64))) < SIGMAS


@each_backend
def test_equal_logits_go_to_the_lowest_id(kernels: Kernels) -> None:
    for vocabulary in (7, 100, 1000, 49152):
        for rows in (1, 2, 17):
            logits = torch.zeros(rows, vocabulary)
            logits[:, vocabulary // 3 :: vocabulary // 5] = 1.5
            expected = torch.full((rows,), vocabulary // 3)
            assert torch.equal(kernels.sample(logits, cases.filters(rows, temperature=[0.0])), expected)
            assert torch.equal(kernels.sample(logits, cases.filters(rows, top_k=[1])), expected)


@pytest.mark.parametrize("values", [{"top_p": [1e-4]}, {"top_p": [0.0]}, {"min_p": [1.0], "top_k": [1]}], ids=str)
@each_backend
def test_the_best_survives_the_sharpest_filter(kernels: Kernels, values: dict[str, list[float]]) -> None:
    logits = torch.randn(50, 49152, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    assert torch.equal(kernels.sample(logits, cases.filters(50, **values)), logits.argmax(-1))


@each_backend
def test_survivors_beyond_the_first_ranks_are_found(kernels: Kernels) -> None:
    """A flat row keeps thousands of ids; one of the last of them is drawn when its noise is the largest."""
    logits = torch.linspace(0.5, 0, 5000).expand(300, -1)
    tokens = kernels.sample(logits, cases.filters(300, top_p=[0.9]))
    assert tokens.max() > 4000
    assert tokens.max() < 4500


def pool(rows: int = 24, vocabulary: int = 3000) -> tuple[Tensor, Filters]:
    """Rows of all kinds: greedy, filtered by each filter and by all, free, flat, tied, broken."""
    logits = cases.some_logits(rows, vocabulary)
    logits[3::8] = (logits[3::8] * 4).round() / 4
    logits[5] = 0.0
    logits[7, 11], logits[15] = torch.nan, -torch.inf
    values = {
        "temperature": [0.0, 1.0, 0.7, 4.0, 1.0],
        "top_k": [0, 0, 40, 0, 2000, 0, 3],
        "top_p": [1.0, 0.9, 1.0, 0.3],
        "min_p": [0.0, 0.0, 0.05],
    }
    return logits, cases.filters(rows, **values)


POOL, FILTERS = pool()
OPS: dict[str, Callable[[Kernels, Tensor, Filters], tuple[Tensor, ...]]] = {
    "sample": lambda kernels, logits, filters: (kernels.sample(logits, filters),),
    "finite": lambda kernels, logits, filters: (kernels.finite(logits),),
    "logprobs": lambda kernels, logits, filters: kernels.logprobs(logits, torch.full((len(logits),), 5), 4),
}


@each_backend
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=30, deadline=None)
@given(chosen=st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=40), small=st.booleans())
def test_a_row_does_not_depend_on_its_company(kernels: Kernels, op: str, chosen: list[int], small: bool) -> None:
    """Bit for bit: any choice of rows in any order, in any size of pieces, gives what the whole pool gives."""
    everyone = OPS[op](kernels, POOL, FILTERS)
    rows = torch.tensor(chosen)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(reference, "SCRATCH_ELEMENTS", 2 * POOL.shape[1])
            patch.setattr(reference, "NOISE_ELEMENTS", POOL.shape[1])
        results = OPS[op](kernels, POOL[rows], reference.take_rows(FILTERS, rows))
    for result, whole in zip(results, everyone, strict=True):
        assert torch.equal(result.nan_to_num(nan=7.0), whole[rows].nan_to_num(nan=7.0))


@each_backend
def test_broken_rows_give_some_id(kernels: Kernels) -> None:
    tokens = kernels.sample(POOL, FILTERS)
    for top in (4, 40, 2000):
        tokens = torch.cat([tokens, kernels.logprobs(POOL, tokens[: len(POOL)], top)[2].ravel()])
    assert ((tokens >= 0) & (tokens < POOL.shape[1])).all()
    assert kernels.finite(POOL).tolist() == [row not in (7, 15) for row in range(len(POOL))]


@each_backend
def test_logits_of_fewer_bits_draw_the_same_with_and_without_neutral_filters(kernels: Kernels) -> None:
    """A filter that lets all pass changes no draw: both paths use the same noise."""
    logits = cases.some_logits(40, 2000)
    free = kernels.sample(logits, cases.filters(40))
    for values in ({"top_k": [10**9]}, {"top_p": [1 - 1e-7]}, {"min_p": [1e-30]}):
        assert torch.equal(kernels.sample(logits, cases.filters(40, **values)), free)


@each_backend
def test_no_rows(kernels: Kernels) -> None:
    logits = torch.zeros(0, 50)
    assert kernels.sample(logits, cases.filters(0)).shape == (0,)
    assert [tuple(part.shape) for part in kernels.logprobs(logits, torch.zeros(0, dtype=torch.int64), 3)] == (
        [(0,), (0, 3), (0, 3)]
    )
    assert kernels.finite(logits).shape == (0,)


@each_backend
def test_penalties_touch_only_their_entries(kernels: Kernels) -> None:
    logits, penalties = next(op for op in cases.OPS if op.name == "penalise").cases[0].make(torch.float32)
    changed = kernels.penalise(logits, penalties) != logits
    named = torch.zeros_like(changed)
    named[penalties.rows, penalties.tokens] = True
    assert not (changed & ~named).any()
    assert changed.any()


@each_backend
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    vocabulary=st.sampled_from([2, 63, 65, 1100, 5003]),
    scale=st.sampled_from([0.0, 1e-38, 0.5, 3.0, 40.0]),
    ties=st.booleans(),
    temperature=st.sampled_from([0.05, 1.0, 7.0]),
    top_k=st.sampled_from([0, 1, 5, 64, 700, 10**6]),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
)
def test_filters_together_draw_from_the_survivors(
    kernels: Kernels,
    vocabulary: int,
    scale: float,
    ties: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """Against survivors found one by one, whatever the cuts leave: one id, all, or an edge among equals."""
    logits = cases.some_logits(3, vocabulary, scale, ties)
    chosen = cases.filters(3, temperature=[temperature], top_k=[top_k], top_p=[top_p], min_p=[min_p])
    (expected,) = cases.expected_sample(logits, chosen)
    assert torch.equal(kernels.sample(logits, chosen), expected)
