"""What compilers make of the GPU kernels in the sizes of an 8B model, and what each case moves and computes: one page.

Run by hand, `.venv/bin/python tests/support/gpu_table.py`, it writes docs/gpu-kernels.md; tests compare the page. Knows
launches without their numbers, and compilers; no device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from compiled import CAPABILITIES, Program, compile_launch, empty, empty_pages
from eight_billion import SHAPES, WEIGHTS, activations, choice_of, weight

from batchgen.kernels.attention import Masking, gpu, gpu_cases
from batchgen.kernels.attention.gpu_choice import Tiles
from batchgen.kernels.chip import Chip
from batchgen.kernels.copy_blocks import gpu as copy_blocks
from batchgen.kernels.grouped import gpu as grouped
from batchgen.kernels.grouped.choice import Choices
from batchgen.kernels.kv_format import LayerPages
from batchgen.kernels.launch import Launch
from batchgen.kernels.rms_norm import gpu as rms_norm
from batchgen.kernels.rotate_write import gpu as rotate_write
from batchgen.kernels.sampling import Filters, Penalties
from batchgen.kernels.sampling import gpu as sampling
from batchgen.kernels.swiglu import gpu as swiglu
from batchgen.kernels.token_mask import gpu as token_mask

PAGE = Path(__file__).resolve().parents[2] / "docs/gpu-kernels.md"
CHIPS = {80: Chip((8, 0), 108, library=False), 90: Chip(library=False), 100: Chip((10, 0), 148, library=False)}
REGISTERS, SHARED = 65536, {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # of a multiprocessor
THREADS, MOST_PROGRAMS = 2048, 32
BANDWIDTH, BFLOAT16, FLOAT8 = 4.3e12, 790e12, 1.5e15  # of an H200, attainable
ROWS, HIDDEN, MLP, VOCABULARY = 512, 4096, 14336, 128256
KEYS = 131072  # bytes of a token, all layers, bfloat16
TOKENS = (16, 64, 512)
FORMATS = ("bfloat16", "fp8", "int8", "int4")
PRODUCTS = (
    "int4, groups of 128, 8-bit floats",
    "int4, groups of 32 with a minimum, 8-bit floats",
    "int4, groups of 32 with a minimum",
    "int8, one scale",
    "fp8, one scale",
    "fp8, groups of 128",
)
HEAD = """# Kernels for GPUs, ahead of time

Made by `tests/support/gpu_table.py` with Triton {version}, in the shape of Llama-3.1-8B. **Nothing here is measured on
a device.**

## Bytes and operations

Bytes are what must be read and written once; splits and codes of activations come on top. At least: the longer of both
at the attainable limits of an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16, 1,500 between 8-bit numbers).

| case | MB | GFLOP | us at least |
|---|---|---|---|
"""
COMPILED = """
## What compilers make of them

For each compute capability: registers of a thread, KiB of shared memory, matrix instructions in the program
(`mma.sync`, `wgmma`, `tcgen05`), and how many programs a multiprocessor holds by registers, threads and shared memory.
No program has a stack, which is where registers are spilled to.

| kernel | 8.0 | 9.0 | 10.0 |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Work:
    """What a case moves and computes at least."""

    name: str
    bytes: float
    operations: float
    rate: float = BFLOAT16

    def row(self) -> str:
        least = max(self.bytes / BANDWIDTH, self.operations / self.rate) * 1e6
        return f"| {self.name} | {self.bytes / 1e6:.1f} | {self.operations / 1e9:.1f} | {least:.1f} |"


def floats(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def whole(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def half(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.bfloat16)


def works() -> Iterator[Work]:
    """Of every case, in the order of the page."""
    for case in gpu_cases.large_op().cases:
        yield Work(f"attention, {case.name}", 2 * case.elements + case.bytes, case.operations)
    for name in PRODUCTS:
        for part in ("output", "gate and up"):
            for rows in TOKENS:
                outputs, inputs = SHAPES[part]
                moved = weight(name, outputs, inputs).num_bytes() + 2 * rows * (inputs + outputs)
                rate = FLOAT8 if WEIGHTS[name][3].itemsize == 1 else BFLOAT16
                yield Work(f"{part}, {name}, {rows} tokens", moved, 2 * rows * outputs * inputs, rate)
    hidden, logits = 2 * ROWS * HIDDEN, 4 * ROWS * VOCABULARY
    for name, moved in {
        "sum and RMS norm": 4 * hidden,
        "gated activation": 2 * ROWS * 3 * MLP,
        "rotation and write, bfloat16": 2 * ROWS * 128 * (48 + 48),
        "copies of a block for each": 2 * ROWS * 16 * KEYS,
        "draw, greedy or from all": logits,
        "draw, top-k or top-p": 3 * logits,
        "log-probabilities": 2 * logits,
        "penalties, 512 entries a row": ROWS * ROWS * 28,
        "grammar masks": logits + logits / 32,
        "finite": logits,
    }.items():
        yield Work(f"{name}, {ROWS} rows", moved, 0)


def launches(capability: int) -> Iterator[tuple[str, Launch]]:
    """The kernels by name, each for one capability."""
    for format in FORMATS:
        yield from _attention(format, capability)
    for name in PRODUCTS:
        if WEIGHTS[name][3] != torch.float8_e4m3fn or CHIPS[capability].has_fp8:
            yield from _products(name, capability)
    for format in FORMATS:
        yield f"rotation and write, {format}", _rotation(format)
    hidden = half(ROWS, HIDDEN)
    yield "sum and RMS norm", rms_norm.plan(hidden, hidden, half(HIDDEN), hidden, 1e-5, add=True)
    yield "gated activation", swiglu.plan(half(ROWS, 2 * MLP), half(ROWS, MLP))
    yield "copies of blocks", copy_blocks.plan(half(32, 2, 8, 50_001, 16, 128), whole(9, 2))
    yield from _sampling()


def _attention(format: str, capability: int) -> Iterator[tuple[str, Launch]]:
    query, stored = half(64, 32, 128), LayerPages(empty_pages(format, 8, 128), empty_pages(format, 8, 128))
    tiles = Tiles(CHIPS[capability], {})
    items, _ = gpu_cases.shared(2000, 64, 100).build()
    layout = gpu.plan_attention(items, 16, tiles).layout(32, stored, query.dtype)
    sums, table = floats(layout.sizes.partials, 32), empty(layout.sizes.offsets()[-1], dtype=torch.int32)
    made = gpu.launches(query, query, query, sums, stored, layout, table, Masking(128**-0.5), tiles)
    for kind, launch in zip(("few queries", "many queries", "merge"), made, strict=True):
        if kind != "merge" or format == FORMATS[0]:
            yield f"attention, {kind}" + (f", {format}" if kind != "merge" else ""), launch


def _products(name: str, capability: int) -> Iterator[tuple[str, Launch]]:
    held, choices = weight(name, *SHAPES["gate and up"]), Choices(CHIPS[capability], {})
    for rows in TOKENS:
        choice = choice_of(choices, name, held, rows)
        if choice.path in ("tiles", "split"):
            shape = (rows, held.shape[0]) if choice.splits == 1 else (choice.splits, rows, held.shape[0])
            out = empty(*shape, dtype=torch.bfloat16 if choice.splits == 1 else torch.float32)
            launch = grouped.plan(activations(name, held, rows), held, None, out, choice)
            yield f"product, {name}, {rows} tokens", launch


def _rotation(format: str) -> Launch:
    query, key, value = half(ROWS, 48, 128).split_with_sizes([32, 8, 8], 1)
    stored = LayerPages(empty_pages(format, 8, 128), empty_pages(format, 8, 128))
    return rotate_write.plan(query, key, value, floats(ROWS, 64), floats(ROWS, 64), whole(ROWS), stored, query)


def _sampling() -> Iterator[tuple[str, Launch]]:
    logits, by_row, tokens = floats(ROWS, VOCABULARY), floats(ROWS), whole(ROWS)
    filters = Filters(by_row, tokens, by_row, by_row, whole(ROWS, 2))
    names = ("draw, greedy or from all", "draw, candidates", "draw, from candidates")
    yield from zip(names, sampling.plan_sample(logits, filters, tokens), strict=True)
    yield "log-probabilities", sampling.plan_logprobs(logits, tokens, by_row, floats(ROWS, 5), whole(ROWS, 5))[1]
    yield "finite", sampling.plan_finite(logits, empty(ROWS, dtype=torch.bool))
    yield "penalties", sampling.plan_penalties(logits, Penalties(whole(99), whole(99), floats(99), *[by_row] * 3))
    yield "grammar masks", token_mask.plan(logits, tokens, empty(ROWS, VOCABULARY // 32, dtype=torch.int32))


def cell(program: Program, warps: int) -> str:
    """Registers, shared memory, matrix instructions and programs of a multiprocessor."""
    capability, threads = program.capability, 32 * warps
    of_warp = -(-program.registers * 32 // 256) * 256  # handed out by 256
    by_registers = REGISTERS // of_warp // warps
    programs = min(by_registers, THREADS // threads, MOST_PROGRAMS, SHARED[capability] // (program.shared + 1024))
    matrix = max(program.matrix_instructions(), program.matrix_instructions(80))
    assert program.stack == 0
    return f"{program.registers}, {program.shared / 1024:.0f} KiB, {matrix}, {programs}"


def compiled() -> dict[str, dict[int, str]]:
    """By kernel and capability; a kernel that a capability has no use for is not in its column."""
    found: dict[str, dict[int, str]] = {}
    for capability in sorted(CAPABILITIES, reverse=True):  # the oldest one lacks some
        for name, launch in launches(capability):
            found.setdefault(name, {})[capability] = cell(compile_launch(launch, capability), launch.num_warps)
    return found


def page() -> str:
    made = compiled().items()
    rows = [f"| {name} | {' | '.join(cells.get(one, '') for one in CAPABILITIES)} |" for name, cells in made]
    head = HEAD.format(version=triton.__version__) + "\n".join(work.row() for work in works())
    return head + "\n" + COMPILED + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
