"""What the attention kernel is compiled for: shapes, formats and a tile. Knows no items."""

import torch
import triton
from torch import Tensor

from ..kv_format import LayerPages, Pages
from ..kv_format.gpu import NARROWEST, Stored, stored
from . import Masking
from .gpu_choice import Tile
from .gpu_kernels import Variant
from .gpu_tasks import Geometry

# Weights times scales are float16 operands, where small scales would be subnormal; a scale is at most the largest
# float16 through the largest code (for int4, twice that), so that raised by so many powers of two it is still finite.
RAISED = {"fp8": 8.0, "int8": 6.0, "int4": 2.0}


def make_variant(
    query: Tensor, pages: LayerPages, geometry: Geometry, masking: Masking, wide: bool, tile: Tile
) -> Variant:
    """What the kernel is compiled for."""
    head_dim = query.shape[2]
    key_side = _side(pages.keys, query.device, wide, keys=True)
    value_side = _side(pages.values, query.device, wide, keys=False)
    return Variant(
        heads=query.shape[1],
        kv_heads=pages.num_kv_heads,
        width=head_dim,
        padded=max(NARROWEST, triton.next_power_of_2(head_dim)),
        block_size=geometry.block_size,
        rows=geometry.rows(wide),
        keys=tile.keys,
        window=masking.window is not None,
        softcap=masking.softcap is not None,
        sinks=masking.sinks is not None,
        split=wide,
        key_side=key_side,
        value_side=value_side,
        raised=RAISED.get(pages.values.format.name, 0.0) if value_side.folds and query.dtype == torch.float16 else 0.0,
    )


def _side(pages: Pages, device: torch.device, wide: bool, *, keys: bool) -> Stored:
    """How a side is read. The interpreter knows no assembly; what int8 has takes registers that wide tiles lack."""
    assembly = device.type != "cpu" and not (wide and pages.format.name == "int8")
    transposed = not wide and not keys
    pairs = transposed and pages.format.scaled and not pages.format.packed and pages.head_dim % 2 == 0
    return stored(pages.format, pages.head_dim, keys=keys, assembly=assembly, moved=transposed, pairs=pairs)
