"""Cases of sampling, penalties and log-probabilities. The truth is found row by row, in float64 and exact integers."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..case import Arguments, Case, Op, Results, generator, normal
from . import Filters, Penalties
from .noise import noise_key

WORD = 0xFFFFFFFF
LARGE = 49152


def expected_noise(key: NDArray[np.int64], vocabulary: int) -> NDArray[np.float64]:
    """The noise of all token ids under one key, after the formula of the contract."""
    bits = _mix((_mix(np.arange(vocabulary, dtype=np.uint64)) ^ np.uint64(key[0])) + np.uint64(key[1]))
    uniform = ((bits & np.uint64(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    uniform = np.minimum(uniform, np.float32(1 - 2.0**-24))
    noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform.astype(np.float64)))
    return noise


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = np.uint64(WORD)
    words = words & word
    words = ((words ^ (words >> np.uint64(16))) * np.uint64(0x7FEB352D)) & word
    words = ((words ^ (words >> np.uint64(15))) * np.uint64(0x846CA68B)) & word
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(16))
    return mixed


def survivors(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that the filters leave of one row, best first, found one token at a time."""
    chances = (logits / temperature).double().softmax(-1).tolist()
    order = sorted(range(len(chances)), key=lambda token: (-float(logits[token]), token))
    order = order[:top_k] if top_k else order
    whole, mass = math.fsum(chances[token] for token in order), 0.0
    kept: list[int] = []
    for token in order:
        if kept and ((top_p < 1 and mass >= top_p * whole) or chances[token] < min_p * chances[order[0]]):
            break
        kept.append(token)
        mass += chances[token]
    return kept


def expected_sample(logits: Tensor, filters: Filters) -> Results:
    out = []
    for row, (temperature, top_k, top_p, min_p) in enumerate(
        zip(
            *(field.tolist() for field in (filters.temperature, filters.top_k, filters.top_p, filters.min_p)),
            strict=True,
        )
    ):
        if temperature == 0:
            out.append(min(range(logits.shape[1]), key=lambda token: (-float(logits[row, token]), token)))
            continue
        kept = survivors(logits[row], temperature, top_k, top_p, min_p)
        noise = expected_noise(filters.noise_keys[row].numpy(), logits.shape[1])
        out.append(max(kept, key=lambda token: (float(logits[row, token]) / temperature + noise[token], -token)))
    return (torch.tensor(out, dtype=torch.int64),)


def expected_penalised(logits: Tensor, penalties: Penalties) -> Results:
    out = logits.double()
    for row, token, count in zip(penalties.rows, penalties.tokens, penalties.answer_counts, strict=True):
        value = out[row, token]
        value = value / penalties.repetition[row] if value > 0 else value * penalties.repetition[row]
        if count > 0:
            value = value - penalties.presence[row] - penalties.frequency[row] * count
        out[row, token] = value
    return (out,)


def expected_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Results:
    scores = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    tokens_up = np.arange(logits.shape[1])
    ids = [np.lexsort((tokens_up, -row))[:top] for row in logits.numpy()]
    best = torch.from_numpy(np.array(ids, dtype=np.int64).reshape(len(logits), top))
    return scores[torch.arange(len(tokens)), tokens], scores.gather(1, best), best


def expected_finite(logits: Tensor) -> Results:
    good = [bool((row.isfinite() | (row == -torch.inf)).all() and (row > -torch.inf).any()) for row in logits]
    return (torch.tensor(good),)


def filters(rows: int, **values: list[float]) -> Filters:
    """Neutral filters, or the given values repeated over the rows."""
    neutral = {"temperature": [1.0], "top_k": [0.0], "top_p": [1.0], "min_p": [0.0]} | values
    columns = {name: torch.tensor([given[row % len(given)] for row in range(rows)]) for name, given in neutral.items()}
    keys = noise_key(0, np.arange(rows), 0, 0)
    return Filters(
        temperature=columns["temperature"].float(),
        top_k=columns["top_k"].long(),
        top_p=columns["top_p"].float(),
        min_p=columns["min_p"].float(),
        noise_keys=torch.from_numpy(keys),
    )


def some_logits(rows: int, vocabulary: int, scale: float = 3.0, ties: bool = False) -> Tensor:
    """Logits with the last tenth masked out; with ties they are rounded until many are equal."""
    logits = normal((rows, vocabulary), torch.float32, rows + vocabulary, scale)
    logits[:, vocabulary - vocabulary // 10 :] = -torch.inf
    return logits.round() if ties else logits


def _sample(
    name: str, rows: int, vocabulary: int, scale: float = 3.0, ties: bool = False, **values: list[float]
) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return some_logits(rows, vocabulary, scale, ties), filters(rows, **values)

    return Case(name, make, elements=rows * vocabulary)


def _penalise(name: str, rows: int, vocabulary: int, entries: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        chosen = torch.randperm(rows * vocabulary, generator=generator(1))[:entries]
        counts = torch.randint(0, 4, (entries,), generator=generator(2)).float()
        repetition, presence, frequency = (1 + normal((rows,), torch.float32, seed).abs() / 4 for seed in (3, 4, 5))
        penalties = Penalties(
            chosen // vocabulary, chosen % vocabulary, counts, repetition, presence - 1, (frequency - 1) / 2
        )
        return some_logits(rows, vocabulary), penalties

    return Case(name, make, elements=2 * rows * vocabulary)


def _logprobs(name: str, rows: int, vocabulary: int, top: int, ties: bool = False) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        tokens = torch.randint(0, vocabulary - vocabulary // 10, (rows,), generator=generator(3))
        return some_logits(rows, vocabulary, ties=ties), tokens, top

    return Case(name, make, elements=rows * vocabulary)


def _broken(dtype: torch.dtype) -> Arguments:
    logits = some_logits(7, 501)
    logits[1, 300], logits[2, 0], logits[3, 500] = torch.nan, torch.inf, -torch.inf
    logits[4], logits[5], logits[6, 1:] = torch.nan, -torch.inf, -torch.inf
    return (logits,)


SAMPLE = Op(
    name="sample",
    run=lambda kernels, logits, filters: (kernels.sample(logits, filters),),
    expected=expected_sample,
    tolerance={torch.float32: 0.0},
    cases=(
        _sample("greedy, ties", 5, 333, ties=True, temperature=[0.0]),
        _sample("neutral", 9, 1001),
        _sample("one token", 3, 1),
        _sample("temperatures", 24, 700, temperature=[0.0, 0.3, 1.0, 2.5, 50.0]),
        _sample("top-k", 24, 700, top_k=[1, 2, 40, 100, 5000]),
        _sample("top-p", 24, 2500, top_p=[1e-4, 0.3, 0.9, 0.999, 1.0], temperature=[0.7, 1.0, 3.0]),
        _sample("min-p", 24, 2500, min_p=[0.0, 0.01, 0.3, 1.0], temperature=[0.7, 1.0, 3.0]),
        _sample("all filters", 60, 1500, top_k=[0, 7, 90], top_p=[1.0, 0.8], min_p=[0.0, 0.02], temperature=[1.0, 2.0]),
        _sample("ties at the edge of top-k", 24, 400, ties=True, top_k=[1, 3, 17]),
        _sample("ties at the edge of top-p", 24, 400, ties=True, top_p=[1e-4, 0.2, 0.6]),
        _sample("all equal", 12, 3000, 0.0, top_k=[3, 0], top_p=[0.5, 1e-4]),
    ),
)
LARGE_SAMPLE = Op(
    name="sample",
    run=SAMPLE.run,
    expected=expected_sample,
    tolerance=SAMPLE.tolerance,
    cases=(
        _sample("greedy, 256 rows", 256, LARGE, temperature=[0.0]),
        _sample("neutral, 256 rows", 256, LARGE),
        _sample("top-p 0.9, 256 rows", 256, LARGE, top_p=[0.9], temperature=[0.6]),
        _sample("top-k 50, 256 rows", 256, LARGE, top_k=[50]),
        _sample("flat, top-p 0.9, 32 rows", 32, LARGE, top_p=[0.9], temperature=[6.0]),
    ),
)
LARGE_PENALISE = Op(
    name="penalise",
    run=lambda kernels, logits, penalties: (kernels.penalise(logits, penalties),),
    expected=expected_penalised,
    tolerance={torch.float32: 1e-6},
    cases=(_penalise("256 rows, 300 tokens each", 256, LARGE, 256 * 300),),
)
LARGE_LOGPROBS = Op(
    name="logprobs",
    run=lambda kernels, logits, tokens, top: kernels.logprobs(logits, tokens, top),
    expected=expected_logprobs,
    tolerance={torch.float32: 1e-5},
    cases=(_logprobs("own alone, 256 rows", 256, LARGE, 0), _logprobs("20 best, 64 rows", 64, LARGE, 20)),
)
OPS = (
    Op(
        name="finite",
        run=lambda kernels, logits: (kernels.finite(logits),),
        expected=expected_finite,
        tolerance={torch.float32: 0.0},
        cases=(Case("all kinds of rows", _broken), Case("one", lambda dtype: (torch.zeros(1, 1),))),
    ),
    Op(
        name="penalise",
        run=LARGE_PENALISE.run,
        expected=expected_penalised,
        tolerance=LARGE_PENALISE.tolerance,
        cases=(
            _penalise("some", 7, 301, 150),
            _penalise("none", 2, 33, 0),
            _penalise("every token", 3, 40, 120),
            _penalise("enough for several threads", 40, 2000, 60000),
        ),
    ),
    Op(
        name="logprobs",
        run=LARGE_LOGPROBS.run,
        expected=expected_logprobs,
        tolerance=LARGE_LOGPROBS.tolerance,
        cases=(
            _logprobs("own alone", 5, 700, 0),
            _logprobs("five", 9, 1001, 5),
            _logprobs("ties", 9, 400, 7, ties=True),
            _logprobs("one token", 2, 1, 1),
            _logprobs("more than there are", 3, 40, 40),
            _logprobs("twenty of several blocks", 40, 5003, 20),
            _logprobs("hundreds, ties", 2, 2500, 300, ties=True),
        ),
    ),
    SAMPLE,
)
