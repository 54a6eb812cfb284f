"""Tile shapes of attention on GPUs: what the kernel is compiled for, a pure function of shapes, formats and the chip.

Knows no items. The figures are those that compilers for sm_80, sm_90 and sm_100 keep in registers; narrow tiles are
read by two programs or more on a processor, so that enough loads are under way.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..chip import Chip
from ..kv_format import LayerPages
from ..kv_format.gpu import NARROWEST, stored
from . import Masking
from .gpu_kernels import Variant
from .gpu_tasks import Geometry

HOPPER, BEHIND = (9, 0), (12, 0)  # between them, matrix operands need no registers
AMPERE = (8, 0)
# Weights times scales are float16 operands, where small scales would be subnormal; a scale is at most the largest
# float16 through the largest code (for int4, twice that), so that raised by so many powers of two it is still finite.
RAISED = {"fp8": 8.0, "int8": 6.0, "int4": 2.0}


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys of one step of the loop, and how the compiler spreads and pipelines it."""

    keys: int
    num_warps: int
    num_stages: int


def wide_rows(pages: LayerPages, dtype: torch.dtype, chip: Chip) -> int:
    """Rows of a wide tile: as many as the accumulators leave room for."""
    in_registers = not HOPPER <= chip.capability < BEHIND
    if dtype == torch.float32 or (_packed(pages) and in_registers):
        return 32
    if _packed(pages) or (in_registers and (pages.keys.head_dim > 128 or chip.capability != AMPERE)):
        return 64
    return 128


def tile(pages: LayerPages, dtype: torch.dtype, wide: bool, chip: Chip) -> Tile:
    """For narrow tasks, which should keep the memory busy, or for wide ones, which should keep the matrix units so."""
    wider = pages.keys.head_dim > 128
    if dtype == torch.float32:
        return Tile(16 if wider else 32, 4, 2)
    if wide:
        if _packed(pages):
            return Tile(32, 4, 2)
        return Tile(32, 8, 2 if HOPPER <= chip.capability < BEHIND else 1) if wider else Tile(64, 8, 2)
    if wider:
        return Tile(32, 4, 3)
    narrowest = max(side.codes.dtype.itemsize for side in (pages.keys, pages.values)) == 1
    return Tile(128, 4, 2) if narrowest and dtype == torch.bfloat16 and chip.capability < BEHIND else Tile(64, 4, 3)


def make_variant(
    query: Tensor, pages: LayerPages, geometry: Geometry, masking: Masking, wide: bool, chip: Chip
) -> Variant:
    """What the kernel is compiled for."""
    head_dim, assembly = query.shape[2], query.device.type != "cpu"  # where the interpreter works
    value_side = stored(pages.values.format, head_dim, False, assembly)
    return Variant(
        heads=query.shape[1],
        kv_heads=pages.num_kv_heads,
        width=head_dim,
        padded=max(NARROWEST, triton.next_power_of_2(head_dim)),
        block_size=geometry.block_size,
        rows=geometry.rows(wide),
        keys=tile(pages, query.dtype, wide, chip).keys,
        window=masking.window is not None,
        softcap=masking.softcap is not None,
        split=wide,
        key_side=stored(pages.keys.format, head_dim, True, assembly),
        value_side=value_side,
        raised=RAISED.get(pages.values.format.name, 0.0) if value_side.folds and query.dtype == torch.float16 else 0.0,
    )


def _packed(pages: LayerPages) -> bool:
    return pages.keys.format.packed or pages.values.format.packed
