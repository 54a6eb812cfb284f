"""The key of a draw's noise: 64 mixed bits of (seed, row, sample, token). Host arithmetic, no tensors.

How a key becomes noise for every vocabulary entry is the device's side, in the contract of this package.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def noise_key(seed: ArrayLike, row: ArrayLike, sample: ArrayLike, token: ArrayLike) -> NDArray[np.int64]:
    """Two words of 32 bits for each draw, [..., 2] int64; arguments below 2**63 broadcast against each other.

    Each argument in turn is added to the state, which is then mixed by the finaliser of SplitMix64 (a bijection of 64
    bits), so draws that differ in one argument never share a key.
    """
    state = np.zeros(np.broadcast_shapes(*(np.shape(part) for part in (seed, row, sample, token))), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (seed, row, sample, token):
            state = _mix(state + np.asarray(part).astype(np.uint64) + _WEYL)
    words = np.stack([state >> np.uint64(32), state & np.uint64(0xFFFFFFFF)], axis=-1)
    return words.astype(np.int64)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
