"""Inputs and truth of the quantised linears, for the cases of both. Knows the contracts, not the ops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..case import Arguments, Case, Results, generator, normal
from . import segment_of

ROWS = (*range(1, 41), 63, 64, 65, 257)
SMOLLM2 = {"qkv": (576, 960), "output": (576, 576), "gate and up": (576, 3072), "down": (1536, 576)}
HEAD = (576, 49152)


@dataclass(frozen=True, slots=True)
class Form:
    """What a weight looks like: group 0 is one group for each output."""

    group: int = 0
    half: bool = True
    minimum: bool = True
    symmetric: bool = False


MakeWeight = Callable[[int, int, Form], Any]


def case(
    make_weight: MakeWeight, name: str, tokens: int, inputs: int, outputs: int, form: Form, bias: bool = False
) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        x = normal((tokens, inputs), dtype, 1)
        return x, make_weight(outputs, inputs, form), normal((outputs,), torch.float32, 3) if bias else None

    weight = make_weight(1, inputs, form)
    per_output = sum(part.nbytes for part in (weight.q, weight.scale, weight.minimum) if part is not None)
    moved = tokens * (inputs + outputs)
    return Case(name, make, elements=moved, bytes=per_output * outputs, operations=2 * tokens * inputs * outputs)


def scales(outputs: int, inputs: int, form: Form, largest: int) -> tuple[Tensor, int]:
    """Scales that make results about 1, [O, groups], and the group size."""
    group = form.group or inputs
    shape = (outputs, -(-inputs // group))
    scale = (torch.rand(shape, generator=generator(5)) + 0.5) * 2 / (largest * inputs**0.5)
    return scale.to(torch.float16 if form.half else torch.float32), group


def common_cases(make_weight: MakeWeight, forms: Sequence[tuple[str, Form]], usual: Form) -> tuple[Case, ...]:
    return (
        *(case(make_weight, f"{rows} rows", rows, 100, 51, usual, bias=True) for rows in ROWS),
        *(case(make_weight, name, 7, 200, 33, form, bias=True) for name, form in forms),
        *(case(make_weight, f"{name}, a decode step", 64, *shape, usual) for name, shape in SMOLLM2.items()),
    )


def speed_cases(make_weight: MakeWeight, usual: Form) -> tuple[Case, ...]:
    """The products of SmolLM2 at sizes of real steps."""
    rows = (1, 16, 64, 256, 2048)
    layers = [case(make_weight, f"{name}, {n} rows", n, *SMOLLM2[name], usual) for name in SMOLLM2 for n in rows]
    return (*layers, *(case(make_weight, f"head, {n} rows", n, *HEAD, usual) for n in (1, 64, 256)))


def expected(x: Tensor, weight: Any, bias: Tensor | None) -> Results:
    """Segment by segment in float64, activations rounded in float32 as the contract says."""
    segment = segment_of(weight.group, x.shape[1])
    codes, numbers = weight.codes().numpy().astype(np.float64), x.float().numpy()
    scale = weight.scale.numpy().astype(np.float64)
    minimum = np.zeros_like(scale) if weight.minimum is None else weight.minimum.numpy().astype(np.float64)
    out = np.zeros((len(numbers), len(codes)))
    for first in range(0, x.shape[1], segment):
        part = numbers[:, first : first + segment]
        largest = np.abs(part).max(axis=1, keepdims=True)
        whole = np.rint(part * (np.float32(127) / largest)).astype(np.float64)
        group = first // weight.group
        products = whole @ codes[:, first : first + segment].T * scale[:, group]
        products += whole.sum(axis=1, keepdims=True) * minimum[:, group]
        out += products * (largest / np.float32(127)).astype(np.float64)
    return (torch.from_numpy(out if bias is None else out + bias.double().numpy()),)
