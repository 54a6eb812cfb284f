"""Inputs and truth of the quantised linears, for the cases of both. Knows the contracts, not the ops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..case import Arguments, Case, Results, generator, normal
from ..hadamard import hadamard
from ..rounding import BFLOAT16, INT8, LARGEST, OWN, Rounding
from . import TURNED

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
    turned: bool = False
    balanced: bool = False


MakeWeight = Callable[[int, int, Form], Any]


def case(
    make_weight: MakeWeight,
    name: str,
    tokens: int,
    inputs: int,
    outputs: int,
    form: Form,
    bias: bool = False,
    path: str | None = None,
) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        x = normal((tokens, inputs), dtype, 1)
        return x, make_weight(outputs, inputs, form), normal((outputs,), torch.float32, 3) if bias else None

    weight = make_weight(1, inputs, form)
    per_output = sum(part.nbytes for part in (weight.q, weight.scale, weight.minimum) if part is not None)
    moved = tokens * (inputs + outputs)
    operations = 2 * tokens * inputs * outputs
    return Case(name, make, elements=moved, bytes=per_output * outputs, operations=operations, path=path)


def scales(outputs: int, inputs: int, form: Form, largest: int) -> tuple[Tensor, int]:
    """Scales that make results about 1, [O, groups], and the group size."""
    group = form.group or inputs
    shape = (outputs, -(-inputs // group))
    scale = (torch.rand(shape, generator=generator(5)) + 0.5) * 2 / (largest * inputs**0.5)
    return scale.to(torch.float16 if form.half else torch.float32), group


def common_cases(
    make_weight: MakeWeight, forms: Sequence[tuple[str, Form]], usual: Form, many: str, split: Sequence[str]
) -> tuple[Case, ...]:
    """`many`: the way of more than 64 rows on a GPU; `split`: linears of a decode step whose inputs are shared out."""
    return (
        *(
            case(make_weight, f"{n} rows", n, 100, 51, usual, bias=True, path="tiles" if n <= 64 else many)
            for n in ROWS
        ),
        *(case(make_weight, name, 7, 200, 33, form, bias=True) for name, form in forms),
        *(
            case(make_weight, f"{name}, a decode step", 64, *shape, usual, path="split" if name in split else "tiles")
            for name, shape in SMOLLM2.items()
        ),
    )


def speed_cases(make_weight: MakeWeight, usual: Form) -> tuple[Case, ...]:
    """The products of SmolLM2 at sizes of real steps."""
    rows = (1, 16, 64, 256, 2048)
    layers = [case(make_weight, f"{name}, {n} rows", n, *SMOLLM2[name], usual) for name in SMOLLM2 for n in rows]
    return (*layers, *(case(make_weight, f"head, {n} rows", n, *HEAD, usual) for n in (1, 64, 256)))


def rounding(kernels: Any, x: Tensor, weight: Any, bias: Tensor | None) -> Rounding:
    """How a table rounds the activations for this weight."""
    rule: Rounding = kernels.rounding(weight)
    return rule


def expected(x: Tensor, weight: Any, bias: Tensor | None, rule: Rounding) -> Results:
    """In float64, group by group, activations rounded in float32 as the rule says."""
    balance = getattr(weight, "balance", None)
    codes, activations = weight.codes().double(), rounded(x if balance is None else x.float() * balance, rule)
    if getattr(weight, "turned", False) and rule.turned == 1:  # a table that turns the weight back: the same product
        activations = hadamard(activations, TURNED)
    out = torch.zeros(len(x), len(codes), dtype=torch.float64)
    for number, first in enumerate(range(0, x.shape[1], weight.group)):
        part = slice(first, first + weight.group)
        out += activations[:, part] @ codes[:, part].T * weight.scale[:, number].double()
        if weight.minimum is not None:
            out += activations[:, part].sum(1, keepdim=True) * weight.minimum[:, number].double()
    return (out if bias is None else out + bias.double(),)


def rounded(x: Tensor, rule: Rounding) -> Tensor:
    """x [T, H] as a rule leaves it, float64. Needs numbers that are finite and segments that are not zero."""
    if rule.numbers == OWN:
        return x.double()
    if rule.numbers == BFLOAT16:
        return x.bfloat16().double()
    parts = [_segment(part, rule.numbers) for part in hadamard(x.float(), rule.turned).split(rule.segment, 1)]
    return torch.cat(parts, 1)


def _segment(part: Tensor, numbers: str) -> Tensor:
    most = torch.tensor(LARGEST[numbers])
    largest = part.abs().amax(1, keepdim=True)
    scaled = (part * (most / largest)).double()
    whole = scaled.round() if numbers == INT8 else nearest(scaled)
    return whole * (largest / most).double()


def number(code: int) -> float:
    """What an e4m3 stands for: sign, 4 bits of exponent, 3 bits behind the point."""
    exponent, fraction = code >> 3 & 15, code & 7
    size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -size if code >> 7 else size


NUMBERS = torch.tensor([number(code) for code in range(256)], dtype=torch.float64)


def nearest(values: Tensor) -> Tensor:
    """The e4m3 next to each number of at most 448; between two, the one with an even code."""
    sizes, edges = NUMBERS[:0x7F], (NUMBERS[:0x7E] + NUMBERS[1:0x7F]) / 2
    above = torch.bucketize(values.abs(), edges)
    tie = (above < len(edges)) & (values.abs() == edges[above.clamp(max=len(edges) - 1)])
    code = torch.where(tie & (above % 2 == 1), above + 1, above)
    return sizes[code] * values.sign()
