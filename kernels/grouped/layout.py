"""A quantised weight as the GPU's product reads it, made once at load. Knows the form, not the product's arithmetic."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from . import NIBBLES, Form
from .choice import Choices

INT8, E4M3, INT4 = "int8", "e4m3", "int4"  # what a code stands for
SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Codes, scales and minima in the order of steps; T steps, S scales of an output in a step.

    codes    4-bit: int16 [T, O, W]; 8-bit with groups: [T, P, O, W]; 8-bit, one group: [O, T * W]; zeros fill the end
    scale    [T, O, S], or [1, O, 1] with one group; minimum the same, or None, then codes count from `zero`
    """

    kind: str
    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    zero: int
    shape: tuple[int, int]
    group: int
    form: Form

    @property
    def steps(self) -> int:
        return -(-self.shape[1] // self.form.step)

    def strides(self) -> tuple[int, int]:
        """Words from a plane (or a step of nibbles) to the next, and from an output to the next."""
        if self.codes.dim() == 2:
            return self.form.width, self.codes.shape[1]
        return self.codes.shape[-2] * self.form.width, self.form.width

    def values(self, rows: Tensor) -> Tensor:
        """[R, H] float32: the given rows of the weight."""
        inputs, form = self.shape[1], self.form
        numbers = self._codes(rows).float() - self.zero
        repeats = form.step // form.scales if form.grouped else numbers.shape[1]
        scale, minimum = (
            None if part is None else part[:, rows].transpose(0, 1).flatten(1).float().repeat_interleave(repeats, 1)
            for part in (self.scale, self.minimum)
        )
        assert scale is not None
        numbers = numbers * scale
        return (numbers if minimum is None else numbers.add_(minimum))[:, :inputs]

    def _codes(self, rows: Tensor) -> Tensor:
        """[R, inputs and what fills them up] of the given rows."""
        if self.form.bits == 4:
            words = self.codes[:, rows].transpose(0, 1)
            return torch.stack([words >> 4 * plane & 15 for plane in range(NIBBLES)], 2).flatten(1)
        codes = self.codes[rows] if self.codes.dim() == 2 else self.codes[:, :, rows].permute(2, 0, 1, 3).flatten(1)
        return codes.view(torch.float8_e4m3fn) if self.kind == E4M3 else codes

    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.minimum) if part is not None)


@dataclass(frozen=True, slots=True)
class Laid:
    """A weight and the choices of its chip: what every product has. `values(rows)` as the weight's."""

    weight: GroupedWeight
    choices: Choices

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def values(self, rows: Tensor) -> Tensor:
        return self.weight.values(rows)

    def num_bytes(self) -> int:
        return self.weight.num_bytes()


def lay_out(
    kind: str, codes: Tensor, scale: Tensor, minimum: Tensor | None, group: int, inputs: int, form: Form
) -> GroupedWeight:
    """codes [O, inputs] (one number each, uint8 for e4m3), scale and minimum [O, groups], in the order of the form."""
    zero = 0
    if kind == INT4 and minimum is not None and torch.equal(minimum.float(), scale.float() * -SYMMETRIC_ZERO):
        minimum, zero = None, SYMMETRIC_ZERO
    ordered = _ordered_codes(codes, form)
    scales, minima = (None if part is None else _by_step(part, group, inputs, form) for part in (scale, minimum))
    assert scales is not None
    return GroupedWeight(kind, ordered, scales, minima, zero, (len(codes), inputs), min(group, inputs), form)


def _ordered_codes(codes: Tensor, form: Form) -> Tensor:
    outputs = len(codes)
    filled = functional.pad(codes, (0, -codes.shape[1] % form.step))
    if form.bits == 8 and not form.grouped:
        return filled.contiguous()
    planes = filled.view(outputs, -1, form.planes, form.width)
    if form.bits == 8:
        return planes.permute(1, 2, 0, 3).contiguous()
    words = torch.zeros(planes.shape[1], outputs, form.width, dtype=torch.int16, device=codes.device)
    for plane in range(NIBBLES):
        words |= planes[:, :, plane].transpose(0, 1).to(torch.int16) << 4 * plane
    return words


def _by_step(part: Tensor, group: int, inputs: int, form: Form) -> Tensor:
    """[O, groups] -> [T, O, S]; what fills the last step up has a scale of zero."""
    if not form.grouped:
        return part.t().unsqueeze(-1).contiguous()
    steps = -(-inputs // form.step)
    first = torch.arange(steps * form.scales, device=part.device) * (form.chain * form.width)
    known = functional.pad(part, (0, 1))
    taken = known[:, (first // group).where(first < inputs, part.shape[1])]
    return taken.view(len(part), steps, form.scales).transpose(0, 1).contiguous()
