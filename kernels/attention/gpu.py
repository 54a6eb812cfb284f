"""Attention by Triton: lays a step out once, in memory that captured graphs can read, and launches its kernels.

Knows tensors and launches. What is launched, and where it reads, depends on the rounded sizes of a layout alone, never
on the values in it.

A CUDA graph is captured around `attention` after one run with the same plan. To replay it for another step:

    for geometry, held in held_plan.layouts.items():
        made = new_plan.laid_out(geometry)               on the host, no copy
        if held.holds(made):                             equal sizes always fit
            held.refill(made)                            on the graph's stream, before the replay

One copy from pinned memory; no address and no grid changes. Rows of query behind the last one of the items come out
with anything in them.
"""

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from ..kv_format import LayerPages
from ..kv_format.gpu import addresses
from ..launch import Launch
from . import AttentionItems, Masking
from .gpu_choice import Tiles
from .gpu_kernels import LOG2_E, attend, merge
from .gpu_tasks import Geometry, Sizes, Table, Tasks, make_tasks
from .gpu_tiles import make_variant

MERGED_NUMBERS = 1024  # that one program of the merge holds: 16 bytes a thread


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

    def holds(self, layout: "Layout") -> bool:
        """The tasks of another step fit in the place of these."""
        return self.sizes.holds(layout.tasks.sizes)

    def widen(self, layout: "Layout") -> None:
        """Before any layer has run: makes as much room as another layout has."""
        self.sizes = type(self.sizes)(*map(max, layout.sizes.counts(), self.sizes.counts()))

    def refill(self, layout: "Layout") -> None:
        """Puts the tasks of another step in the place of these. Raises ValueError when they do not fit or none ran."""
        if self._table is None or not self.holds(layout) or self.geometry != layout.geometry:
            raise ValueError(f"attention: a step of {layout.tasks.sizes} does not fit a layout of {self.sizes}")
        self.tasks = layout.tasks
        self._table.copy_(_staged(self.tasks.table(self.sizes), self._table.device), non_blocking=True)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The items of a step and the layouts made of them, one per geometry, when it is first asked for."""

    items: AttentionItems
    block_size: int
    tiles: Tiles
    layouts: dict[Geometry, Layout] = field(default_factory=dict)

    def layout(self, num_heads: int, pages: LayerPages, dtype: torch.dtype) -> Layout:
        """For queries of this dtype over such pages. Raises ValueError when a query is in no item."""
        rows, processors = self.tiles.wide_rows(pages, dtype), self.tiles.chip.multiprocessors
        return self.laid_out(Geometry(num_heads, pages.num_kv_heads, self.block_size, processors, rows))

    def laid_out(self, geometry: Geometry) -> Layout:
        """The same for a geometry that another plan has a layout for."""
        if geometry not in self.layouts:
            tasks = make_tasks(self.items, geometry)
            self.layouts[geometry] = Layout(geometry, tasks, tasks.sizes.rounded())
        return self.layouts[geometry]


def plan_attention(items: AttentionItems, block_size: int, tiles: Tiles) -> GpuPlan:
    """See the contract. Nothing is copied to a device before a layer runs or a layout is refilled."""
    return GpuPlan(items, block_size, tiles)


def attention(query: Tensor, pages: LayerPages, plan: GpuPlan, masking: Masking) -> Tensor:
    """[T, Q, D] attended over the pages of a layer; see the contract."""
    num_heads, head_dim = query.shape[1:]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not len(query):
        return out
    if pages.block_step not in (0, pages.block_size):
        raise ValueError("attention on a device: blocks must lie side by side")
    query = query if query.stride(2) == 1 else query.contiguous()
    layout = plan.layout(num_heads, pages, query.dtype)
    sizes = (max(layout.sizes.partials, 1), num_heads)
    partials = torch.empty(*sizes, head_dim, dtype=query.dtype, device=query.device)
    sums = torch.empty(sizes, device=query.device)
    table = layout.table(query.device)
    for launch in launches(query, out, partials, sums, pages, layout, table, masking, plan.tiles):
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
    tiles: Tiles,
) -> list[Launch]:
    """What one layer launches: narrow tasks, wide tasks, the merge; those alone that there are."""
    offsets = layout.sizes.offsets()
    narrow, wide, merges, *lists = (table[begin:] for begin in offsets[:-1])
    inner, outer = _score_factors(masking)
    made = []
    for tasks, count, is_wide in ((narrow, layout.sizes.narrow, False), (wide, layout.sizes.wide, True)):
        if not count:
            continue
        chosen = tiles.choose(pages, query.dtype, is_wide)
        variant = make_variant(query, pages, layout.geometry, masking, is_wide, chosen)
        arguments = (
            *(query, out, partials, sums, *addresses(pages.keys)),
            *(*addresses(pages.values, pairs=variant.value_side.pairs), tasks, *lists),
            *(query.stride(0), query.stride(1), pages.head_step, pages.block_step, inner, outer, masking.window or 0),
            masking.sinks,
        )
        grid = (count * pages.num_kv_heads,)
        made.append(Launch(attend, grid, arguments, {"V": variant}, chosen.num_warps, chosen.num_stages))
    if layout.sizes.merges:
        made.append(_merge_launch((out, partials, sums, merges, masking.sinks), layout.sizes.merges))
    return made


def _merge_launch(tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], count: int) -> Launch:
    """For results, partial ones, their log-sum-exps, the table of merges and the sinks."""
    out, _, _, _, sinks = tensors
    num_heads, width = out.shape[1:]
    padded = triton.next_power_of_2(width)
    some = min(triton.next_power_of_2(num_heads), max(1, MERGED_NUMBERS // padded))
    constants = {"HEADS": num_heads, "SOME": some, "WIDTH": width, "PADDED": padded, "SINKS": sinks is not None}
    return Launch(merge, (count, triton.cdiv(num_heads, some)), tensors, constants)


def _score_factors(masking: Masking) -> tuple[float, float]:
    """What products are multiplied by, and the cap: in units of log2, as the kernel's formula for tanh wants them."""
    if masking.softcap is None:
        return masking.scale * LOG2_E, 0.0
    return 2 * LOG2_E * masking.scale / masking.softcap, masking.softcap * LOG2_E


def _staged(table: Table, device: torch.device) -> Tensor:
    """The table in memory that the device copies from without the host waiting."""
    host = torch.from_numpy(table)
    return host.pin_memory() if device.type == "cuda" else host
