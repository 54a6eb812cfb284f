"""Kernels beside the limits of the device, both measured in one run: GB/s of a copy, TFLOP/s of a matrix product.

A kernel that disagrees with the reference on the same device is not timed. Sizes are those of an 8B model's steps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_checks import on_device
from gpu_eight_billion import step_cases
from gpu_results import Budget, seconds_of

from batchgen import kernels as op_tables
from batchgen.engine.kv import KVPages, KVShape
from batchgen.kernels import Kernels
from batchgen.kernels.attention import AttentionItems, Masking
from batchgen.kernels.case import error
from batchgen.kernels.cases import LARGE
from batchgen.kernels.kv_format import FORMATS
from batchgen.kernels.tables import ReferenceKernels

BLOCK = 16
LOOSE = 0.05  # of 1 + |expected|, between two computations that round in their own ways


@dataclass(frozen=True, slots=True)
class Limits:
    """FLOP/s of products in bfloat16 and fp8 (0 where there is none), bytes/s of a copy, read and written."""

    bfloat16: float
    fp8: float
    bandwidth: float


def measure_limits(device: torch.device, smoke: bool) -> Limits:
    size = 256 if smoke else 8192
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = 2 * size**3 / seconds_of(lambda: left @ right, device)
    source = torch.randn((1 << 20) if smoke else (1 << 29), device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)
    return Limits(product, _fp8_rate(left, right, device), copied)


def _fp8_rate(left: torch.Tensor, right: torch.Tensor, device: torch.device) -> float:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return 0.0
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    rows, columns = torch.ones(len(a), 1, device=device), torch.ones(1, len(a), device=device)
    call = torch._scaled_mm
    return 2 * len(a) ** 3 / seconds_of(lambda: call(a, b, rows, columns, out_dtype=torch.bfloat16), device)


def time_kernels(budget: Budget, device: torch.device, limits: Limits, smoke: bool) -> None:
    kernels = op_tables.load(str(device))
    for name, make in _attention_cases(kernels, device, smoke):
        budget.measure(name, 4.0, lambda make=make: _timed(*make(), device, limits))
    for name, make in step_cases(kernels, device, smoke):
        budget.measure(name, 2.0, lambda make=make: _timed(*make(), device, limits))
    for op in LARGE:
        for case in op.cases[:1] if smoke else op.cases:
            if not smoke or case.operations < 10**9:
                name = f"{op.name}: {case.name}"
                budget.measure(name, 4.0, lambda op=op, case=case: _large(op, case, kernels, device, limits))


def _large(op: Any, case: Any, kernels: Kernels, device: torch.device, limits: Limits) -> dict[str, Any]:
    dtype = torch.bfloat16 if torch.bfloat16 in op.tolerance else next(iter(op.tolerance))
    arguments = on_device(case.make(dtype), device)
    call = op.prepare(kernels, *arguments) if op.prepare else lambda: op.run(kernels, *arguments)
    moved = case.elements * dtype.itemsize + case.bytes
    return _timed(call, None, moved, case.operations, device, limits)


def _timed(
    call: Callable[[], Any],
    off: float | None,
    moved: float,
    operations: float,
    device: torch.device,
    limits: Limits,
) -> dict[str, Any]:
    if off is not None and off > LOOSE:
        return {"ok": False, "off": off}
    took = seconds_of(call, device)
    return {
        "us": took * 1e6,
        "GB/s": moved / took / 1e9,
        "of_copy": moved / took / limits.bandwidth,
        "TFLOP/s": operations / took / 1e12,
        "of_gemm": operations / took / limits.bfloat16,
    }


Made = tuple[Callable[[], Any], float | None, float, float]


def _attention_cases(kernels: Kernels, device: torch.device, smoke: bool) -> Iterator[tuple[str, Callable[[], Made]]]:
    rows, context = ((4,), 40) if smoke else ((64, 256, 512), 1024)
    for name in ("bfloat16", "fp8", "int8", "int4"):
        for count in rows:
            yield (
                f"attention decode {count} x {context}, KV {name}",
                lambda c=count, n=name: _attention(kernels, device, c, 1, context, n),
            )
    length = 48 if smoke else 2048
    yield f"attention prefill {length}", lambda: _attention(kernels, device, 1, length, length, "bfloat16")


def _attention(kernels: Kernels, device: torch.device, rows: int, queries: int, context: int, kv: str) -> Made:
    """`rows` sequences of `context` keys each, whose last `queries` tokens attend; heads of an 8B model."""
    blocks = -(-context // BLOCK)
    items = AttentionItems(
        start=np.zeros(rows, np.int64),
        length=np.full(rows, context),
        block_offset=np.arange(rows + 1) * blocks,
        blocks=np.random.default_rng(0).permutation(rows * blocks),
        query_offset=np.arange(rows + 1) * queries,
        queries=np.arange(rows * queries),
        positions=np.tile(np.arange(context - queries, context), rows),
    )
    shape = KVShape(1, 8, 128, FORMATS[kv])
    layer = KVPages(shape, rows * blocks, BLOCK, device).layer(0)
    _fill(kernels, layer, rows * blocks * BLOCK, device)
    query = torch.randn(rows * queries, 32, 128, device=device).bfloat16()
    plan, masking = kernels.plan_attention(items, BLOCK), Masking(128**-0.5, None)
    reference = ReferenceKernels()
    expected = reference.attention(query, layer, reference.plan_attention(items, BLOCK), masking)
    off = error(kernels.attention(query, layer, plan, masking), expected)
    pairs = rows * (queries * (context - queries) + queries * (queries + 1) / 2)
    moved = rows * context * shape.bytes_per_token + 2 * query.nbytes
    return lambda: kernels.attention(query, layer, plan, masking), off, moved, 4 * 32 * 128 * pairs


def _fill(kernels: Kernels, layer: Any, slots: int, device: torch.device) -> None:
    """Random keys and values in every slot, a part at a time."""
    for start in range(0, slots, 1 << 16):
        count = min(1 << 16, slots - start)
        key, value = (torch.randn(count, 8, 128, device=device).bfloat16() for _ in range(2))
        query, one = torch.randn(count, 32, 128, device=device).bfloat16(), torch.ones(count, 64, device=device)
        kernels.rotate_write(query, key, value, one, one * 0, torch.arange(start, start + count, device=device), layer)
