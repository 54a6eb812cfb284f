"""Tile shapes of attention on GPUs: a pure function of formats, widths and the chip, or what was tuned for a device.

Knows no items and no kernel. The built-in figures are those that compilers for sm_80, sm_90 and sm_100 keep in
registers; narrow tiles are read by two programs or more on a processor, so that enough loads are under way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..chip import Chip
from ..kv_format import FORMATS, LayerPages

HOPPER, BEHIND = (9, 0), (12, 0)  # between them, matrix operands need no registers
AMPERE = (8, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys of one step of the loop, and how the compiler spreads and pipelines it."""

    keys: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.keys} keys, {self.num_warps} warps, {self.num_stages} stages"


class TileKey(NamedTuple):
    """Steps that are tuned together: formats of the pages, dtype and width of the queries, many of these or few."""

    keys: str
    values: str
    dtype: str
    head_dim: int
    wide: bool


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one chip; `tuned` has what was measured on it, by `TileKey`."""

    chip: Chip
    tuned: Mapping[Any, Any]

    def choose(self, pages: LayerPages, dtype: torch.dtype, wide: bool) -> Tile:
        """For narrow tasks, which should keep the memory busy, or wide ones, which should keep the matrix units so."""
        key = TileKey(pages.keys.format.name, pages.values.format.name, str(dtype)[6:], pages.keys.head_dim, wide)
        return self.tuned.get(key) or built_in(key, self.chip)

    def wide_rows(self, pages: LayerPages, dtype: torch.dtype) -> int:
        """Rows of a wide tile: as many as the accumulators leave room for."""
        in_registers = not HOPPER <= self.chip.capability < BEHIND
        packed = _packed(pages.keys.format.name, pages.values.format.name)
        if dtype == torch.float32 or (packed and in_registers):
            return 32
        if packed or (in_registers and (pages.keys.head_dim > 128 or self.chip.capability != AMPERE)):
            return 64
        return 128


def built_in(key: TileKey, chip: Chip) -> Tile:
    """What is taken where nothing was tuned."""
    wider = key.head_dim > 128
    if key.dtype == "float32":
        return Tile(16 if wider else 32, 4, 2)
    if key.wide:
        if _packed(key.keys, key.values):
            return Tile(32, 4, 2)
        return Tile(32, 8, 2 if HOPPER <= chip.capability < BEHIND else 1) if wider else Tile(64, 8, 2)
    if wider:
        return Tile(32, 4, 3)
    narrowest = max(FORMATS[name].dtype.itemsize for name in (key.keys, key.values)) == 1
    return Tile(128, 4, 2) if narrowest and key.dtype == "bfloat16" and chip.capability < BEHIND else Tile(64, 4, 3)


def tile_candidates(key: TileKey) -> Iterator[Tile]:
    """What tuning tries; a device has no room for some of them."""
    for keys in (32, 64, 128):
        if key.wide:
            yield from (Tile(keys, warps, stages) for warps, stages in ((4, 2), (8, 1), (8, 2), (8, 3)))
        else:
            yield from (Tile(keys, 4, stages) for stages in (2, 3, 4))


def _packed(*formats: str) -> bool:
    return any(FORMATS[name].packed for name in formats)
