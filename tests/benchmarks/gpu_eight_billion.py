"""The ops of a step of Llama-3.1-8B but attention: inputs made on the device, a part of each result computed plainly.

What is moved counts weights, scales, activations and results once; splits, expanded weights and codes of activations
are the kernel's own affair and count against it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from same_rounding import as_rounded

from batchgen.kernels import Kernels
from batchgen.kernels.case import error
from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight
from batchgen.kernels.linear_int8 import Int8Weight
from batchgen.kernels.rounding import OWN, Rounding
from batchgen.kernels.sampling import Filters

Made = tuple[Callable[[], Any], float | None, float, float]
SHAPES = {"output": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}  # outputs, inputs
HEAD = (128256, 4096)
ROWS = (1, 16, 64, 256, 2048)
MIDDLE = (512, 1024)  # where 4-bit codes meet 8-bit floats, besides
CHECKED = 48  # outputs and rows of a product that are computed a second time
SMALL = {"output": (64, 256)}


def step_cases(kernels: Kernels, device: torch.device, smoke: bool) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Name, and what makes (the call to time, its error, bytes moved, operations)."""
    for form in FORMS:
        for part, (outputs, inputs) in (SMALL if smoke else SHAPES).items():
            for rows in (3, 70) if smoke else (*ROWS, *(MIDDLE if "int4" in form else ())):
                name = f"8B {part} {outputs}x{inputs}, {form}, {rows} rows"
                yield name, partial(_linear, kernels, device, form, rows, outputs, inputs)
    outputs, inputs = (600, 128) if smoke else HEAD
    for rows in (5,) if smoke else (16, 64, 512):
        yield f"8B head, int8, {rows} rows", partial(_linear, kernels, device, "int8", rows, outputs, inputs)
    for rows in (5,) if smoke else (64, 512, 1024):
        for name, make in SAMPLING.items():
            yield f"8B {name}, {rows} rows of {outputs}", partial(make, kernels, device, rows, outputs)
    for rows in (5,) if smoke else (512, 8192):
        yield f"8B add_rms_norm, {rows} rows", partial(_norm, kernels, device, rows, inputs)
        yield f"8B swiglu, {rows} rows", partial(_swiglu, kernels, device, rows, 7 * inputs // 2)


def _bytes(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=device)


def _scale(outputs: int, groups: int, size: float, device: torch.device) -> torch.Tensor:
    return (torch.rand(outputs, groups, device=device) + 0.5) * size


def _int4(outputs: int, inputs: int, device: torch.device, group: int, symmetric: bool) -> Int4Weight:
    scale = _scale(outputs, inputs // group, 0.2 * inputs**-0.5, device).half()
    minimum = scale * (-8 if symmetric else -7.3)
    return Int4Weight(_bytes(outputs, inputs // 2, device), scale, minimum.half(), group)


def _int8(outputs: int, inputs: int, device: torch.device, group: int = 0) -> Int8Weight:
    group = group or inputs
    scale = _scale(outputs, inputs // group, 0.014 * inputs**-0.5, device)
    return Int8Weight(_bytes(outputs, inputs, device).view(torch.int8), scale, None, group)


def _fp8(outputs: int, inputs: int, device: torch.device, group: int = 0) -> Fp8Weight:
    group = group or inputs
    codes = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, _scale(outputs, inputs // group, inputs**-0.5, device), group)


def _dense(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
    return (torch.randn(outputs, inputs, device=device) * inputs**-0.5).bfloat16()


FORMS: dict[str, Callable[[int, int, torch.device], Any]] = {
    "bfloat16": _dense,
    "int4 groups of 128": partial(_int4, group=128, symmetric=True),
    "int4 groups of 32 with a minimum": partial(_int4, group=32, symmetric=False),
    "int8": _int8,
    "int8 groups of 32": partial(_int8, group=32),
    "fp8": _fp8,
    "fp8 groups of 128": partial(_fp8, group=128),
}


def _linear(kernels: Kernels, device: torch.device, form: str, rows: int, outputs: int, inputs: int) -> Made:
    weight, x = FORMS[form](outputs, inputs, device), torch.randn(rows, inputs, device=device).bfloat16()
    result = torch.float32 if outputs > 100_000 else torch.bfloat16
    call, rule = _call(kernels, x, weight, result)
    some = torch.arange(0, outputs, max(1, outputs // CHECKED), device=device)
    values = weight[some].float() if isinstance(weight, torch.Tensor) else weight.values(some)
    expected = as_rounded(x[:CHECKED], rule).double() @ values.double().T
    parts = (weight,) if isinstance(weight, torch.Tensor) else (weight.q, weight.scale, weight.minimum)
    held = sum(part.nbytes for part in parts if part is not None)
    moved = held + x.nbytes + rows * outputs * result.itemsize
    return call, error(call()[:CHECKED][:, some], expected), moved, 2 * rows * outputs * inputs


def _call(
    kernels: Kernels, x: torch.Tensor, weight: Any, result: torch.dtype
) -> tuple[Callable[[], torch.Tensor], Rounding]:
    if isinstance(weight, torch.Tensor):
        dense = kernels.pack_dense(weight, None)
        return lambda: kernels.linear(x, dense), Rounding(OWN)
    pack, op = {
        Int4Weight: (kernels.pack_int4, kernels.linear_int4),
        Int8Weight: (kernels.pack_int8, kernels.linear_int8),
        Fp8Weight: (kernels.pack_fp8, kernels.linear_fp8),
    }[type(weight)]
    packed = pack(weight)
    return lambda: op(x, packed, None, result), kernels.rounding(weight)


def _logits(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, vocabulary, device=device) * 3


def _filters(rows: int, device: torch.device, **values: float) -> Filters:
    def column(name: str, neutral: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), values.get(name, neutral), dtype=dtype, device=device)

    keys = torch.randint(0, 2**32, (rows, 2), device=device)
    cuts = column("top_k", 0, torch.int64), column("top_p", 1.0), column("min_p", 0.0)
    return Filters(column("temperature", 1.0), *cuts, keys)


def _sample(values: dict[str, float], kernels: Kernels, device: torch.device, rows: int, vocabulary: int) -> Made:
    """Checked where the answer is known: greedy, and that a draw is among the best of the row."""
    logits, filters = _logits(rows, vocabulary, device), _filters(rows, device, **values)
    drawn = kernels.sample(logits, filters)
    rank = (logits > logits.gather(1, drawn.unsqueeze(1))).sum(1)
    most = {"temperature": 1, "top_k": values.get("top_k", 1)}.get(next(iter(values), ""), vocabulary)
    off = 0.0 if int(rank.max()) < most else float("inf")
    return lambda: kernels.sample(logits, filters), off, logits.nbytes, 0


def _finite(kernels: Kernels, device: torch.device, rows: int, vocabulary: int) -> Made:
    logits = _logits(rows, vocabulary, device)
    return lambda: kernels.finite(logits), float(not bool(kernels.finite(logits).all())), logits.nbytes, 0


def _logprobs(kernels: Kernels, device: torch.device, rows: int, vocabulary: int) -> Made:
    logits, tokens = _logits(rows, vocabulary, device), torch.arange(rows, device=device)
    own, values, _ = kernels.logprobs(logits, tokens, 5)
    scores = logits.log_softmax(-1)
    off = max(error(own, scores.gather(1, tokens.unsqueeze(1)).squeeze(1)), error(values, scores.topk(5).values))
    return lambda: kernels.logprobs(logits, tokens, 5), off, logits.nbytes, 0


def _mask(kernels: Kernels, device: torch.device, rows: int, vocabulary: int) -> Made:
    logits, every = _logits(rows, vocabulary, device), torch.arange(rows, device=device)
    bits = torch.zeros(rows, -(-vocabulary // 32), dtype=torch.int32, device=device)
    kernels.mask(logits, every, bits)
    return lambda: kernels.mask(logits, every, bits), float((logits > -torch.inf).sum()), logits.nbytes + bits.nbytes, 0


SAMPLING: dict[str, Callable[..., Made]] = {
    "sample greedy": partial(_sample, {"temperature": 0.0}),
    "sample whole distribution": partial(_sample, {}),
    "sample top-k 50": partial(_sample, {"top_k": 50}),
    "sample top-p 0.9": partial(_sample, {"top_p": 0.9}),
    "finite": _finite,
    "logprobs 5": _logprobs,
    "mask": _mask,
}


def _norm(kernels: Kernels, device: torch.device, rows: int, width: int) -> Made:
    x, weight = torch.randn(rows, width, device=device).bfloat16(), torch.ones(width, device=device).bfloat16()
    residual = torch.zeros_like(x)
    expected = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    off = error(kernels.add_rms_norm(residual, x, weight, 1e-5), expected)
    return lambda: kernels.add_rms_norm(residual, x, weight, 1e-5), off, 4 * x.nbytes, 0


def _swiglu(kernels: Kernels, device: torch.device, rows: int, width: int) -> Made:
    gate_up = torch.randn(rows, 2 * width, device=device).bfloat16()
    gate, up = gate_up.float().chunk(2, -1)
    off = error(kernels.swiglu(gate_up), torch.nn.functional.silu(gate) * up)
    return lambda: kernels.swiglu(gate_up), off, 1.5 * gate_up.nbytes, 0
