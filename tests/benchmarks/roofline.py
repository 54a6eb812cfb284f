"""What the machine allows: its matrix product rate P and memory bandwidth B, and the rows/s they bound a workload to.

For N_L layer weights, N_H head weights, N = N_L + N_H, A = 4 * heads * head size * layers FLOP for every query and key,
kv bytes of keys and values per token, b bytes per number:

    prefill of S new tokens behind K cached ones   (2 N_L S + A (S K + S^2 / 2) + 2 N_H) / P
    one decoded token, batch n, context C          max(2 N / P, N b / (B n)) + C max(kv / B, A / P)

S is what the prefix tree of all rows adds with a row, once for all its samples. Not counted: sampling, norms, the small
batch at the end, Python. The sequential roofline of Williams et al. (2009), kernel by kernel.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from batchgen.engine.spec import ModelSpec

BATCH = 256
BYTES = {"bfloat16": 2, "int8": 1}  # of weights, activations and keys
ROWS = (64, 256, 1024)
BYTES_COPIED = 2**28
LEAST_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Machine:
    """FLOP/s by number format, bytes/s."""

    flops: dict[str, float]
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Size:
    """The model in the letters of the formulas."""

    layers: int  # N_L
    head: int  # N_H
    pair: int  # A
    kv_numbers: int

    @property
    def weights(self) -> int:
        return self.layers + self.head


def size_of(spec: ModelSpec) -> Size:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    layer = spec.hidden_size * (2 * (heads + kv_heads) * spec.head_dim + 3 * spec.intermediate_size)
    return Size(
        layers=spec.num_layers * layer,
        head=spec.hidden_size * spec.vocab_size,
        pair=4 * heads * spec.head_dim * spec.num_layers,
        kv_numbers=2 * spec.num_layers * kv_heads * spec.head_dim,
    )


def fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    call()
    best, end = float("inf"), time.perf_counter() + LEAST_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_machine(spec: ModelSpec) -> Machine:
    """P over a large product and the model's own MLP, the best of the kernels torch has; B of a sum and of a copy."""
    shapes = [(1024, 2048, 2048), *((rows, spec.hidden_size, 2 * spec.intermediate_size) for rows in ROWS)]
    flops = {
        "bfloat16": max(_bfloat16_rate(*shape) for shape in shapes),
        "int8": max(rate(*shape) for shape in shapes for rate in (_int8_rate, _fused_int8_rate)),
    }
    source = torch.ones(BYTES_COPIED // 4)
    target = torch.empty_like(source)
    copied = 2 * BYTES_COPIED / fastest(lambda: target.copy_(source))
    return Machine(flops, max(copied, BYTES_COPIED / fastest(source.sum)))


def _bfloat16_rate(rows: int, inner: int, columns: int) -> float:
    x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
    return 2 * rows * inner * columns / fastest(lambda: functional.linear(x, weight))


def _int8_rate(rows: int, inner: int, columns: int) -> float:
    x = torch.randint(-127, 127, (rows, inner), dtype=torch.int8)
    weight = torch.randint(-127, 127, (inner, columns), dtype=torch.int8)
    return 2 * rows * inner * columns / fastest(lambda: torch._int_mm(x, weight))


def _fused_int8_rate(rows: int, inner: int, columns: int) -> float:
    x = torch.randint(0, 255, (rows, inner), dtype=torch.uint8)  # signed ones would take torch's reference kernel
    weight = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 127, (columns, inner), dtype=torch.int8), None)
    scale, zero = torch.rand(columns), torch.zeros(columns, dtype=torch.int64)
    tail = (None, 1.0, 0, torch.bfloat16, "none", [], "")
    call = torch.ops.onednn.qlinear_pointwise
    return 2 * rows * inner * columns / fastest(lambda: call(x, 0.01, 128, weight, scale, zero, *tail))


def common(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    end = min(len(first), len(second))
    return next((at for at in range(end) if first[at] != second[at]), end)


def bound(rows: list[dict[str, Any]], size: Size, machine: Machine, form: str) -> float:
    """Rows/s when every distinct prefix is computed once. Rows of one workload have equal lengths and samples."""
    flops, samples, length = machine.flops[form], rows[0]["n"], rows[0]["max_tokens"]
    batch = min(BATCH, len(rows) * samples)
    pair = size.pair / flops
    key = max(size.kv_numbers * BYTES[form] / machine.bandwidth, pair)
    token = max(2 * size.weights / flops, size.weights * BYTES[form] / (machine.bandwidth * batch))
    prompts = sorted(row["tokens"] for row in rows)
    seconds = 0.0
    for prompt, known in zip(prompts, [0, *(common(a, b) for a, b in pairwise(prompts))], strict=True):
        new = len(prompt) - known
        seconds += (2 * size.layers * new + 2 * size.head) / flops + new * (known + new / 2) * pair
        seconds += samples * (length - 1) * (token + (len(prompt) + length / 2) * key)
    return len(rows) / seconds


def distinct_tokens(rows: list[dict[str, Any]]) -> int:
    """Nodes of the prefix tree of all prompts."""
    prompts = sorted(row["tokens"] for row in rows)
    return sum(map(len, prompts)) - sum(common(a, b) for a, b in pairwise(prompts))
