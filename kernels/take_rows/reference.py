"""Rows of a table in plain PyTorch."""

from torch import Tensor


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """[T, W]; see the contract."""
    return table[index]
