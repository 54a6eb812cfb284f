"""Products of 8-bit codes on both sides: activations rounded for each token, or for each token and group.

Knows which way a batch goes and what the vendor's library can do; not how codes are made or multiplied.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch
from ..rounding import INT8, Rounding
from . import gpu
from .activations import rounded
from .choice import Choice, narrow
from .layout import Laid

COLUMNS = 1024


@triton.jit
def scale_sums(sums, token_scale, scale, bias, out, outputs, BIAS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [T, O] = sums int32 times the scales of token and output, plus bias."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = row < outputs
    total = tl.load(sums + token * outputs + row, mask=known, other=0).to(tl.float32)
    total *= tl.load(scale + row, mask=known, other=0.0).to(tl.float32)
    total *= tl.load(token_scale + token)
    if BIAS:
        total += tl.load(bias + row, mask=known, other=0.0)
    tl.store(out + token * outputs + row, total.to(out.dtype.element_ty), mask=known)


@dataclass(frozen=True, slots=True)
class Narrow(Laid):
    """A weight of 8-bit codes, and how its activations are rounded."""

    rounding: Rounding

    def __call__(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [T, H] rounded, times the weight, plus bias float32, as [T, O] in `dtype`."""
        choice = self.choice(len(x), dtype)
        activations = self.activations(x)
        if choice.path != "library":
            return gpu.product(activations, self.weight, bias, dtype, choice)
        if self.rounding.numbers == INT8:
            return self._whole(activations, bias, dtype)
        return self._floats(activations, bias, dtype)

    def activations(self, x: Tensor) -> gpu.Activations:
        form = self.weight.form
        filled = self.weight.steps * form.step
        segment = self.rounding.segment if form.grouped else filled
        codes, scale = rounded(x, self.rounding.numbers, segment, filled)
        return gpu.Activations(codes, None, scale, True) if form.grouped else gpu.Activations(codes, scale[0, : len(x)])

    def choice(self, tokens: int, dtype: torch.dtype) -> Choice:
        return narrow(self.choices, self.weight, tokens, self.rounding.numbers, dtype)

    def _whole(self, x: gpu.Activations, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        sums = torch._int_mm(x.numbers, self.weight.codes.t())
        out = torch.empty(sums.shape, dtype=dtype, device=sums.device)
        plan_scales(sums, x.token_scale, self.weight.scale, bias, out).run()
        return out

    def _floats(self, x: gpu.Activations, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert x.token_scale is not None
        codes = self.weight.codes.view(torch.float8_e4m3fn).t()
        scales = x.token_scale.unsqueeze(1), self.weight.scale.view(1, -1).float()
        out = torch._scaled_mm(x.numbers, codes, *scales, out_dtype=dtype)
        return out if bias is None else out.add_(bias)


def plan_scales(sums: Tensor, token_scale: Tensor | None, scale: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
    """The launch that scales sums [T, O] int32 to out [T, O]."""
    tokens, outputs = sums.shape
    arguments = (sums, token_scale, scale, out if bias is None else bias, out, outputs)
    grid = (tokens, -(-outputs // COLUMNS))
    return Launch(scale_sums, grid, arguments, {"BIAS": bias is not None, "COLUMNS": COLUMNS})
