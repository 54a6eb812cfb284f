"""The noise is what the contract says, Gumbel-distributed, and unrelated over rows, samples, tokens, seeds and ids."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from batchgen.kernels.sampling.cases import expected_noise
from batchgen.kernels.sampling.gumbel import noise, premix
from batchgen.kernels.sampling.noise import noise_key

VOCABULARY = 4096
FIELDS = ("seed", "row", "sample", "token")
FROZEN_KEYS = [[556823690, 2865234536], [4034346463, 2479480039]]
FROZEN_NOISE = [0.367731, 0.114419, -1.029809, 0.644678]
SIGMAS = 4.5  # inputs are fixed, so a test either always passes or never does


def keys(varied: str, count: int, **fixed: int) -> np.ndarray:
    """Keys of neighbours: one argument runs from 0, the others stand still."""
    return noise_key(*(np.arange(count) if name == varied else fixed.get(name, 0) for name in FIELDS))


def draw(noise_keys: np.ndarray, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return noise(torch.from_numpy(noise_keys).unsqueeze(-2), premix(torch.arange(vocabulary)))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean."""
    degrees = observed.size - 1
    return (float(((observed - expected) ** 2 / expected).sum()) - degrees) / math.sqrt(2 * degrees)


def test_the_key_is_frozen() -> None:
    """A changed key would change the answers of a resumed job."""
    assert noise_key(0, 0, 0, 0).tolist() == FROZEN_KEYS[0]
    assert noise_key(2**63 - 1, 2**63 - 1, 7, 123).tolist() == FROZEN_KEYS[1]


def test_the_noise_is_frozen() -> None:
    values = draw(noise_key(1, 2, 3, 4), 4).tolist()
    assert values == pytest.approx(FROZEN_NOISE, abs=1e-6)


def test_the_noise_is_the_contracts() -> None:
    for key in keys("row", 20):
        np.testing.assert_allclose(draw(key).numpy(), expected_noise(key, VOCABULARY), atol=2e-6, rtol=2e-6)


def test_keys_broadcast_and_do_not_depend_on_company() -> None:
    rows, tokens = np.array([5, 0, 2**62]), np.array([0, 1, 9])
    together = noise_key(3, rows, 1, tokens)
    assert together.shape == (3, 2)
    assert [noise_key(3, int(row), 1, int(token)).tolist() for row, token in zip(rows, tokens, strict=True)] == (
        together.tolist()
    )
    assert ((together >= 0) & (together < 2**32)).all()


@pytest.mark.parametrize("varied", FIELDS)
def test_every_bit_of_the_arguments_changes_half_of_the_key(varied: str) -> None:
    base = np.random.default_rng(1).integers(0, 2**63 - 1, 400)
    for bit in range(63):
        changed = [
            noise_key(*(values if name == varied else 11 for name in FIELDS)) for values in (base, base ^ (1 << bit))
        ]
        flipped = np.unpackbits((changed[0] ^ changed[1]).astype(np.uint32).view(np.uint8)).sum() / len(base)
        assert 30 < flipped < 34


def test_neighbours_have_distinct_keys() -> None:
    grid = noise_key(*np.meshgrid(np.arange(20), np.arange(40), np.arange(8), np.arange(40)))
    assert len(np.unique(grid.reshape(-1, 2), axis=0)) == 20 * 40 * 8 * 40


@pytest.mark.parametrize("varied", FIELDS)
def test_noise_is_gumbel(varied: str) -> None:
    """exp(-exp(-noise)) is uniform, over all ids and over each argument's neighbours."""
    uniform = torch.exp(-torch.exp(-draw(keys(varied, 500)).double()))
    for part in (uniform, uniform[:, :16], uniform[::37]):
        observed = np.histogram(part.numpy(), bins=200, range=(0, 1))[0]
        assert abs(chi_square(observed, np.full(200, part.numel() / 200))) < SIGMAS


def test_the_tail_is_gumbel() -> None:
    """The large values, which decide draws, come as often as they should."""
    values = torch.cat([draw(keys("row", 500, seed=seed)).ravel() for seed in range(5)])
    for level in (4.0, 8.0, 12.0):
        expected = values.numel() * -math.expm1(-math.exp(-level))
        assert abs(int((values > level).sum()) - expected) < SIGMAS * math.sqrt(expected)


@pytest.mark.parametrize("varied", FIELDS)
def test_neighbours_are_uncorrelated(varied: str) -> None:
    values = torch.exp(-torch.exp(-draw(keys(varied, 400)).double())) - 0.5
    for first, second in (
        (values[1:], values[:-1]),  # neighbouring draws, same id
        (values[:, 1:], values[:, :-1]),  # same draw, neighbouring ids
        (values[1:, 1:], values[:-1, :-1]),
        (values[256:], values[:-256]),
        (values[:, 2048:], values[:, :-2048]),
    ):
        correlation = float((first * second).mean()) * 12
        assert abs(correlation) < SIGMAS / math.sqrt(first.numel())


def inverse_mix(word: int) -> int:
    """The word that the mixer of the contract turns into `word`."""
    word ^= word >> 16
    word = word * pow(0x846CA68B, -1, 2**32) % 2**32
    word ^= word >> 15 ^ word >> 30
    word = word * pow(0x7FEB352D, -1, 2**32) % 2**32
    return word ^ word >> 16


@pytest.mark.parametrize(
    ("bits", "value"), [(0, 22.1807), (0x80000000, 22.1807), (0x7FFFFFFF, -2.8115), (0xFFFFFFFF, -2.8115)]
)
def test_the_extremes_are_finite(bits: int, value: float) -> None:
    """Id 0 is premixed to 0, so the second word of the key chooses its bits."""
    key = torch.tensor([0, inverse_mix(bits)])
    assert float(noise(key, premix(torch.tensor(0)))) == pytest.approx(value, abs=1e-3)


def test_noise_does_not_depend_on_company() -> None:
    """Bit for bit, wherever an id stands in a tensor: vector and remainder loops agree."""
    key = torch.from_numpy(noise_key(1, 2, 3, 4))
    whole = noise(key, premix(torch.arange(1000)))
    for start in range(70):
        for size in (1, 3, 16, 33, 200):
            assert torch.equal(noise(key, premix(torch.arange(start, start + size))), whole[start : start + size])


def test_the_key_loads_no_torch() -> None:
    code = "import sys, batchgen.kernels.sampling.noise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
