"""Attention by Triton: lays a step out once, in memory that captured graphs can read, and launches its kernels.

Knows tensors, launches and tile shapes. What is launched, and where it reads, depends on the rounded sizes of a layout
alone, never on the values in it.

A CUDA graph is captured around `attention` after one run with the same plan. To replay it for another step:

    layout = plan.layout(num_heads, num_kv_heads)     of the new step, made on the host
    captured.layout(num_heads, num_kv_heads).refill(layout)     if its sizes hold the new ones, on the graph's stream

One copy from pinned memory; no address and no grid changes. Rows of query behind the last one of the items, and rows of
a step with fewer queries, come out with anything in them.
"""

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from ..kv_format import LayerPages, Pages
from ..kv_format.gpu import NARROWEST, stored
from ..launch import Launch
from . import AttentionItems, Masking
from .gpu_kernels import Variant, attend, merge
from .gpu_tasks import Geometry, Sizes, Table, Tasks, make_tasks

LOG2_E = 1.4426950408889634
PROCESSORS = 132  # of the device that is not there, when the interpreter stands in for one
NATIVE_FP8 = 89  # the lowest capability that converts e4m3 codes
MERGED_NUMBERS = 2048  # that one program of the merge holds


@dataclass(slots=True)
class Layout:
    """The tasks of a step for models of one geometry, and their place on the device once a layer has run."""

    geometry: Geometry
    tasks: Tasks
    sizes: Sizes
    _table: Tensor | None = None

    def table(self, device: torch.device) -> Tensor:
        """int32, as `Sizes.offsets` lays it out."""
        if self._table is None:
            self._table = _staged(self.tasks.table(self.sizes), device).to(device, non_blocking=True)
        return self._table

    def refill(self, layout: "Layout") -> None:
        """Puts the tasks of another step in the place of these. Raises ValueError when they do not fit or none ran."""
        if self._table is None or not self.sizes.holds(layout.tasks.sizes) or self.geometry != layout.geometry:
            raise ValueError(f"attention: a step of {layout.tasks.sizes} does not fit a layout of {self.sizes}")
        self.tasks = layout.tasks
        self._table.copy_(_staged(self.tasks.table(self.sizes), self._table.device), non_blocking=True)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The items of a step and the layouts made of them, one per geometry, when it is first asked for."""

    items: AttentionItems
    block_size: int
    processors: int
    layouts: dict[Geometry, Layout] = field(default_factory=dict)

    def layout(self, num_heads: int, num_kv_heads: int) -> Layout:
        """Raises ValueError when a query is in no item."""
        geometry = Geometry(num_heads, num_kv_heads, self.block_size, self.processors)
        if geometry not in self.layouts:
            tasks = make_tasks(self.items, geometry)
            self.layouts[geometry] = Layout(geometry, tasks, tasks.sizes.rounded())
        return self.layouts[geometry]


@dataclass(frozen=True, slots=True)
class Tile:
    """How a class of tasks is compiled."""

    keys: int
    num_warps: int
    num_stages: int


def plan_attention(items: AttentionItems, block_size: int) -> GpuPlan:
    """See the contract. Nothing is copied to a device before a layer runs or a layout is refilled."""
    return GpuPlan(items, block_size, _processors())


def attention(query: Tensor, pages: LayerPages, plan: GpuPlan, masking: Masking) -> Tensor:
    """[T, Q, D] attended over the pages of a layer; see the contract."""
    num_heads, head_dim = query.shape[1:]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not len(query):
        return out
    query = query if query.stride(2) == 1 else query.contiguous()
    layout = plan.layout(num_heads, pages.num_kv_heads)
    sizes = (max(layout.sizes.partials, 1), num_heads)
    partials = torch.empty(*sizes, head_dim, dtype=query.dtype, device=query.device)
    sums = torch.empty(sizes, device=query.device)
    table = layout.table(query.device)
    for launch in launches(query, out, partials, sums, pages, layout, table, masking, _capability(query.device)):
        launch.run()
    return out


def launches(
    query: Tensor,
    out: Tensor,
    partials: Tensor,
    sums: Tensor,
    pages: LayerPages,
    layout: Layout,
    table: Tensor,
    masking: Masking,
    capability: int,
) -> list[Launch]:
    """What one layer launches: narrow tasks, wide tasks, the merge; those alone that there are."""
    offsets = layout.sizes.offsets()
    narrow, wide, merges, *lists = (table[begin:] for begin in offsets[:-1])
    inner, outer = _score_factors(masking)
    made = []
    for tasks, count, is_wide in ((narrow, layout.sizes.narrow, False), (wide, layout.sizes.wide, True)):
        variant = make_variant(query, pages, layout.geometry, masking, is_wide, capability)
        chosen = tile(variant, query.dtype, capability)
        arguments = (
            *(query, out, partials, sums, *_addresses(pages.keys), *_addresses(pages.values), tasks, *lists),
            *(query.stride(0), query.stride(1), pages.num_blocks * pages.block_size, inner, outer, masking.window or 0),
        )
        grid = (count * pages.num_kv_heads,)
        made.append(Launch(attend, grid, arguments, {"V": variant}, chosen.num_warps, chosen.num_stages))
    made.append(_merge_launch(out, partials, sums, merges, layout.sizes.merges))
    return [launch for launch in made if all(launch.grid)]


def _merge_launch(out: Tensor, partials: Tensor, sums: Tensor, merges: Tensor, count: int) -> Launch:
    num_heads, width = out.shape[1:]
    padded = triton.next_power_of_2(width)
    some = min(triton.next_power_of_2(num_heads), max(1, MERGED_NUMBERS // padded))
    constants = {"HEADS": num_heads, "SOME": some, "WIDTH": width, "PADDED": padded}
    return Launch(merge, (count, triton.cdiv(num_heads, some)), (out, partials, sums, merges), constants)


def make_variant(
    query: Tensor, pages: LayerPages, geometry: Geometry, masking: Masking, wide: bool, capability: int
) -> Variant:
    """What the kernel is compiled for, of these tensors' shapes and formats."""
    head_dim, native = query.shape[2], capability >= NATIVE_FP8
    key = stored(pages.keys.format, head_dim, True, native)
    value = stored(pages.values.format, head_dim, False, native)
    return Variant(
        heads=query.shape[1],
        kv_heads=pages.num_kv_heads,
        width=head_dim,
        padded=max(NARROWEST, triton.next_power_of_2(head_dim)),
        block_size=geometry.block_size,
        rows=geometry.rows(wide),
        keys=_keys(head_dim, query.dtype),
        window=masking.window is not None,
        softcap=masking.softcap is not None,
        split=wide,
        key_side=key,
        value_side=value,
    )


def tile(variant: Variant, dtype: torch.dtype, capability: int) -> Tile:
    """The shape of a class of tasks: a pure function of what it is compiled for."""
    wide = variant.rows > 64
    return Tile(variant.keys, 8 if wide else 4, 2 if wide else 3)


def _keys(head_dim: int, dtype: torch.dtype) -> int:
    return 64 if head_dim * dtype.itemsize <= 256 else 32


def _score_factors(masking: Masking) -> tuple[float, float]:
    """What products are multiplied by, and the cap: in units of log2, as the kernel's formula for tanh wants them."""
    if masking.softcap is None:
        return masking.scale * LOG2_E, 0.0
    return 2 * LOG2_E * masking.scale / masking.softcap, masking.softcap * LOG2_E


def _addresses(pages: Pages) -> tuple[Tensor, Tensor]:
    """Codes, those of one byte as bytes, and scales; a format without scales has codes in their place."""
    codes = pages.codes.view(torch.uint8) if pages.codes.dtype == torch.float8_e4m3fn else pages.codes
    return codes, pages.scales if pages.format.scaled else codes


def _staged(table: Table, device: torch.device) -> Tensor:
    """The table in memory that the device copies from without the host waiting."""
    host = torch.from_numpy(table)
    return host.pin_memory() if device.type == "cuda" else host


def _capability(device: torch.device) -> int:
    """90 for H100 and H200; of the newest when the interpreter stands in."""
    if device.type != "cuda":
        return 100
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _processors() -> int:
    if not torch.cuda.is_available():
        return PROCESSORS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
