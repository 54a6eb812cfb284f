"""KV pages: the storage behind block ids. Which block belongs to whom is decided in blocks.py."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one cached token takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPages:
    """Keys and values of every layer, [num_kv_heads, num_blocks, block_size, head_dim] each, in one allocation.

    Host memory is zeroed by the system when a page is first touched, so blocks that are never used cost nothing.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        sizes = (shape.num_layers, 2, shape.num_kv_heads, num_blocks, block_size, shape.head_dim)
        self._pages = _zeros(sizes, shape.dtype, device)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination) each, in every layer; no destination is a source."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs, device=self._pages.device).T
        self._pages.index_copy_(3, destination, self._pages.index_select(3, source))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """The key and the value pages of one layer."""
        return self._pages[index, 0], self._pages[index, 1]


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    memory = np.zeros(math.prod(sizes) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(sizes)
