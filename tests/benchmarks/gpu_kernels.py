"""Kernels beside the limits of the device, both measured in one run: GB/s of a copy, TFLOP/s of a matrix product.

A kernel that disagrees with the reference on the same device is not timed. Sizes are those of an 8B model's steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_checks import on_device
from gpu_eight_billion import step_cases
from gpu_results import Budget, seconds_of

from batchgen import kernels as op_tables
from batchgen.kernels import Kernels
from batchgen.kernels.attention.gpu_cases import large_op
from batchgen.kernels.case import Case, Op, error
from batchgen.kernels.cases import LARGE

PLAIN = 8  # cases of attention over bfloat16, which come first
SMALLER = 64  # times, of rows and keys in a trial without a device
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
    steps = list(step_cases(kernels, device, smoke))
    attention = large_op(scale=SMALLER if smoke else 1)
    plain, narrow = attention.cases[:PLAIN], attention.cases[PLAIN:]  # by the format of keys and values
    for case in plain[:3] if smoke else plain:
        _time_attention(budget, case, attention, kernels, device, limits)
    for name, make in steps:
        budget.measure(name, 2.0, lambda make=make: _timed(*make(), device, limits))
    for case in narrow[:1] if smoke else narrow:
        _time_attention(budget, case, attention, kernels, device, limits)
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


def _time_attention(budget: Budget, case: Case, op: Op, kernels: Kernels, device: torch.device, limits: Limits) -> None:
    budget.measure(f"8B attention: {case.name}", 3.0, lambda: _attention(case, op, kernels, device, limits))


def _attention(case: Case, op: Op, kernels: Kernels, device: torch.device, limits: Limits) -> dict[str, Any]:
    """Inputs made on the device, some rows of the result computed plainly there."""
    with device:
        arguments = case.make(torch.bfloat16)
        (found,), (expected,) = op.run(kernels, *arguments), op.expected(*arguments)
        call = op.prepare(kernels, *arguments)
    moved = 2 * case.elements + case.bytes
    return _timed(call, error(found, expected), moved, case.operations, device, limits)
