"""KV pages: the storage behind block ids. Which block belongs to whom is decided in blocks.py."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels import Kernels
from ..kernels.kv_format import KVFormat, LayerPages, Pages
from ..kernels.native.memory import populate
from .link import Link

ALIGNMENT = 64  # bytes: vectors of common widths then fill whole cache lines
_BY_LAYER = 1, 2, 3, 0, 4, 5  # [N, layers, 2, K, B, width], as it lies on the host, to [layers, 2, K, N, B, width]
_BY_BLOCK = 3, 0, 1, 2, 4, 5  # and back


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one cached token takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    format: KVFormat

    @property
    def bytes_per_token(self) -> int:
        """Codes and scales of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.format.vector_bytes(self.head_dim)


class KVPages:
    """Keys and values of every layer in one format: codes in one allocation, their scales in another.

    On the host all that belongs to a block lies side by side. The system hands out memory in pieces of up to 2 MiB and
    zeroes them when they are first touched, so blocks that are neither used nor prepared cost nothing. On a device
    layers lie apart.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        kind, width = shape.format, shape.head_dim
        sizes = (shape.num_layers, 2, shape.num_kv_heads, num_blocks, block_size)
        self._codes = _zeros((*sizes, kind.width(width)), kind.dtype, device)
        self._scales = _zeros((*sizes, kind.num_scales(width)), torch.float32, device)
        self._layers = tuple(LayerPages(self._pages(index, 0), self._pages(index, 1)) for index in range(sizes[0]))

    def copy_blocks(self, pairs: list[tuple[int, int]], kernels: Kernels, link: Link) -> None:
        """Copies whole blocks, (source, destination) each, in every layer; no destination is a source."""
        if pairs:
            places = link.to_device(np.array(pairs, np.int64))
            for stored in (self._codes, self._scales):
                kernels.copy_blocks(stored, places)

    def populate(self, num_blocks: int) -> None:
        """Has memory found for the first so many blocks where it would be when they are first written to."""
        for stored in (self._codes, self._scales):
            if stored.is_cpu and stored.numel():
                populate(stored.permute(_BY_BLOCK)[:num_blocks])

    def clear(self) -> None:
        """Writes zeros to all of it."""
        self._codes.zero_()
        self._scales.zero_()

    def layer(self, index: int) -> LayerPages:
        """The key and the value pages of one layer."""
        return self._layers[index]

    def _pages(self, layer: int, side: int) -> Pages:
        return Pages(self.shape.format, self._codes[layer, side], self._scales[layer, side], self.shape.head_dim)


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of [layers, 2, K, N, B, width]."""
    if device.type != "cpu" or not math.prod(sizes):
        return torch.zeros(sizes, dtype=dtype, device=device)
    size = math.prod(sizes) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % ALIGNMENT
    layers, sides, heads, blocks, *vectors = sizes
    by_block = memory[start : start + size].view(dtype).view(blocks, layers, sides, heads, *vectors)
    return by_block.permute(_BY_LAYER)
