"""Vectors times an orthonormal Hadamard matrix in plain PyTorch: what keys and activations are turned by.

Knows the order of its sums, so that a faster version can be equal bit for bit; not what is turned.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor


def hadamard(vectors: Tensor, block: int) -> Tensor:
    """[..., D] float32 times the matrix of each `block` neighbours, a power of two that divides D.

    Sums and differences of neighbours, of pairs, and so on. Done twice, it gives the vectors back.
    """
    shape, reach = vectors.shape, 1
    while reach < block:
        pairs = vectors.reshape(-1, 2, reach)
        left, right = pairs[:, 0], pairs[:, 1]
        vectors = torch.stack((left + right, left - right), 1)
        reach *= 2
    return vectors.reshape(shape) * float(np.float32(1) / np.sqrt(np.float32(block)))


def hadamard_product(vectors: Tensor, block: int) -> Tensor:
    """The same as a matrix product, many times as fast, but for the order of its sums: for what is turned once."""
    return (vectors.reshape(-1, block) @ _matrix(block).to(vectors.device)).view(vectors.shape)


@cache
def _matrix(block: int) -> Tensor:
    return hadamard(torch.eye(block), block)
