"""The linears of Llama-3.1-8B as launches, without their numbers: tensors on the meta device."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from batchgen.kernels.chip import Chip
from batchgen.kernels.grouped import Form, form_of, gpu
from batchgen.kernels.grouped.choice import Choice, Choices, mixed, narrow, wide
from batchgen.kernels.grouped.layout import E4M3, INT4, INT8, GroupedWeight
from batchgen.kernels.launch import Launch
from batchgen.kernels.rounding import E4M3 as ROUND_E4M3
from batchgen.kernels.rounding import INT8 as ROUND_INT8

SHAPES = {  # outputs, inputs
    "output": (4096, 4096),
    "qkv": (6144, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (16, 64, 256, 1)
WHOLE = 1 << 30  # a group for the whole output
WEIGHTS = {  # kind of codes, group, with a minimum, numbers of the activations
    "int4, groups of 32": (INT4, 32, False, torch.bfloat16),
    "int4, groups of 32 with a minimum": (INT4, 32, True, torch.bfloat16),
    "int4, groups of 128": (INT4, 128, False, torch.float16),
    "int4, groups of 32, 8-bit floats": (INT4, 32, False, torch.float8_e4m3fn),
    "int4, groups of 32 with a minimum, 8-bit floats": (INT4, 32, True, torch.float8_e4m3fn),
    "int4, groups of 128, 8-bit floats": (INT4, 128, False, torch.float8_e4m3fn),
    "int4, groups of 128 with a minimum, 8-bit floats": (INT4, 128, True, torch.float8_e4m3fn),
    "int4, one scale, 8-bit floats": (INT4, WHOLE, True, torch.float8_e4m3fn),
    "int8, groups of 32": (INT8, 32, False, torch.bfloat16),
    "int8, groups of 16": (INT8, 16, False, torch.bfloat16),
    "int8, one scale": (INT8, WHOLE, False, torch.int8),
    "fp8, one scale": (E4M3, WHOLE, False, torch.float8_e4m3fn),
    "fp8, groups of 128": (E4M3, 128, False, torch.float8_e4m3fn),
    "fp8, one scale, plain activations": (E4M3, WHOLE, False, torch.bfloat16),
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(name: str, outputs: int, inputs: int) -> GroupedWeight:
    kind, group, has_minimum, _ = WEIGHTS[name]
    form = form_of(4 if kind == INT4 else 8, group, inputs)
    assert form is not None
    steps = inputs // form.step
    scale = empty(*(steps, outputs, form.scales) if form.grouped else (1, outputs, 1), dtype=torch.float16)
    zero = 8 if kind == INT4 and not has_minimum else 0
    codes = _codes(kind, form, steps, outputs)
    shape = (outputs, inputs)
    return GroupedWeight(kind, codes, scale, scale if has_minimum else None, zero, shape, min(group, inputs), form)


def _codes(kind: str, form: Form, steps: int, outputs: int) -> torch.Tensor:
    if kind == INT4:
        return empty(steps, outputs, form.width, dtype=torch.int16)
    dtype = torch.int8 if kind == INT8 else torch.uint8
    shape = (steps, form.planes, outputs, form.width) if form.grouped else (outputs, steps * form.width)
    return empty(*shape, dtype=dtype)


def activations(name: str, held: GroupedWeight, rows: int) -> gpu.Activations:
    kind, _, has_minimum, dtype = WEIGHTS[name]
    x = empty(rows, held.shape[1], dtype=dtype)
    terms = empty(held.steps * held.form.scales, -(-rows // 128) * 128, dtype=torch.float32)
    if dtype.itemsize > 1:
        return gpu.Activations(x, terms=terms if has_minimum else None)
    if kind == INT4:
        return gpu.Activations(x, empty(rows, dtype=torch.float32), terms)
    if held.form.grouped:
        return gpu.Activations(x, terms=terms, scaled=True)
    return gpu.Activations(x, empty(rows, dtype=torch.float32))


def choice_of(choices: Choices, name: str, held: GroupedWeight, rows: int) -> Choice:
    """As the linears choose, results in bfloat16."""
    numbers = {torch.int8: ROUND_INT8, torch.float8_e4m3fn: ROUND_E4M3}.get(WEIGHTS[name][3])
    if numbers is None:
        return wide(choices, held, rows)
    if held.kind == INT4:
        return mixed(choices, held, rows)
    return narrow(choices, held, rows, numbers, torch.bfloat16)


def products(chip: Chip, name: str) -> Iterator[Launch]:
    """The launches of a kind of weight for every shape and number of rows that differ in the loop that is compiled."""
    seen = set()
    choices = Choices(replace(chip, library=False), {})
    for (outputs, inputs), rows in ((shape, rows) for shape in SHAPES.values() for rows in ROWS):
        held = weight(name, outputs, inputs)
        choice = choice_of(choices, name, held, rows)
        if choice.path in ("tiles", "split"):
            result = (choice.splits, rows, outputs) if choice.splits > 1 else (rows, outputs)
            out = empty(*result, dtype=torch.float32 if choice.splits > 1 else torch.bfloat16)
            launch = gpu.plan(activations(name, held, rows), held, None, out, choice)
            key = (replace(launch.constants["V"], split=False), launch.num_warps, launch.num_stages)
            if key not in seen:
                seen.add(key)
                yield launch
