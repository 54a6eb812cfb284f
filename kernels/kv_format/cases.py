"""Pages for the cases of `rotate_write` and `attention`, filled so that a slot read by mistake shows."""

import torch
from torch import Tensor

from . import FORMATS, KVFormat, LayerPages, Pages

BY_DTYPE = {made.dtype: made for made in FORMATS.values()}


def plain_pages(keys: Tensor, values: Tensor) -> LayerPages:
    """Pages that hold the numbers [K, N, B, D] themselves."""
    return LayerPages(_plain(keys), _plain(values))


def empty_pages(format: KVFormat, num_heads: int, num_blocks: int, block_size: int, head_dim: int) -> Pages:
    """Pages whose every number is NaN; where codes cannot be, the scales are."""
    sizes = (num_heads, num_blocks, block_size)
    codes = torch.full((*sizes, format.width(head_dim) * format.dtype.itemsize), 0xFF, dtype=torch.uint8)
    scales = torch.full((*sizes, format.num_scales(head_dim)), torch.nan)
    return Pages(format, codes.view(format.dtype), scales, head_dim)


def _plain(numbers: Tensor) -> Pages:
    return Pages(BY_DTYPE[numbers.dtype], numbers, torch.empty(*numbers.shape[:3], 0), numbers.shape[3])
