"""Blocks copied one by one, as they lie side by side on the host."""

from torch import Tensor


def copy_blocks(stored: Tensor, pairs: Tensor) -> None:
    """stored [L, S, K, N, B, W] is written in place; see the contract."""
    for source, destination in pairs.tolist():
        stored[:, :, :, destination] = stored[:, :, :, source]
