"""How fast this machine multiplies and attends in each number format, measured in a few milliseconds on random numbers.

Knows the shapes of a model; neither its weights nor what a format costs in accuracy.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..kernels import Kernels
from ..kernels.attention import AttentionItems, Masking
from ..kernels.linear_fp8 import Fp8Weight
from ..kernels.linear_int4 import Int4Weight
from ..kernels.linear_int8 import Int8Weight
from .kv import KVPages, KVShape
from .spec import ModelSpec

SECONDS = 0.05  # for each format
ROWS = 256  # of a full step
MOST_OUTPUTS = 2048
BLOCK_SIZE = 16


@torch.inference_mode()
def linear_seconds(kernels: Kernels, spec: ModelSpec, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of a product of ROWS tokens with a part of the largest linear, by weight format."""
    outputs, inputs = min(2 * spec.intermediate_size, MOST_OUTPUTS), spec.hidden_size
    x = torch.randn(ROWS, inputs, dtype=dtype)
    return {name: _fastest(make(kernels, x, outputs, inputs)) for name, make in _LINEARS.items()}


def _native(kernels: Kernels, x: torch.Tensor, outputs: int, inputs: int) -> Callable[[], object]:
    weight = torch.randn(outputs, inputs, dtype=x.dtype)
    return lambda: kernels.linear(x, weight, None)


def _int8(kernels: Kernels, x: torch.Tensor, outputs: int, inputs: int) -> Callable[[], object]:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    packed = kernels.pack_int8(Int8Weight(codes, torch.ones(outputs, 1), None, inputs))
    return lambda: kernels.linear_int8(x, packed, None, x.dtype)


def _int4(kernels: Kernels, x: torch.Tensor, outputs: int, inputs: int) -> Callable[[], object]:
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scale = torch.ones(outputs, -(-2 * codes.shape[1] // 32), dtype=torch.float16)
    packed = kernels.pack_int4(Int4Weight(codes, scale, scale, 32))
    part = x[:, : 2 * codes.shape[1]]
    return lambda: kernels.linear_int4(part, packed, None, x.dtype)


def _fp8(kernels: Kernels, x: torch.Tensor, outputs: int, inputs: int) -> Callable[[], object]:
    codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    packed = kernels.pack_fp8(Fp8Weight(codes, torch.ones(outputs, 1), inputs))
    return lambda: kernels.linear_fp8(x, packed, None, x.dtype)


_LINEARS: Mapping[str, Callable[[Kernels, torch.Tensor, int, int], Callable[[], object]]] = {
    "native": _native,
    "int8": _int8,
    "int4": _int4,
    "fp8": _fp8,
}


@torch.inference_mode()
def attention_seconds(
    kernels: Kernels, spec: ModelSpec, shapes: Mapping[str, KVShape], dtype: torch.dtype, context: int
) -> dict[str, float]:
    """Seconds of one layer's attention of 64 rows over `context` cached tokens of their own each, by KV format."""
    rows, blocks = 64, -(-context // BLOCK_SIZE)
    items = AttentionItems(
        start=np.zeros(rows, np.int64),
        length=np.full(rows, context),
        block_offset=np.arange(rows + 1) * blocks,
        blocks=np.arange(rows * blocks),
        query_offset=np.arange(rows + 1),
        queries=np.arange(rows),
        positions=np.full(rows, context - 1),
    )
    query = torch.randn(rows, spec.num_heads, spec.head_dim, dtype=dtype)
    masking, plan = Masking(spec.attention_scale, None), kernels.plan_attention(items, BLOCK_SIZE)
    found = {}
    for name, shape in shapes.items():
        layer = KVPages(shape, rows * blocks, BLOCK_SIZE, torch.device("cpu")).layer(0)
        slots = torch.arange(rows * blocks * BLOCK_SIZE)
        vectors = torch.randn(len(slots), spec.num_kv_heads, spec.head_dim, dtype=dtype)
        cos, sin = torch.ones(len(slots), spec.head_dim // 2), torch.zeros(len(slots), spec.head_dim // 2)
        kernels.rotate_write(vectors, vectors, vectors, cos, sin, slots, layer)
        found[name] = _fastest(lambda layer=layer: kernels.attention(query, layer, plan, masking))  # type: ignore[misc]
    return found


def _fastest(call: Callable[[], object]) -> float:
    """The fastest of several calls: what else runs on the machine only makes them slower."""
    call()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while True:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            return best
