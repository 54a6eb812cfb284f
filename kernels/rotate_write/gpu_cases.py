"""Cases of rotary encoding with the KV write for GPUs: few tokens, and a step padded to the size of a captured one."""

from dataclasses import replace

import torch
from torch import Tensor

from ..case import Arguments, Case, Op, Results
from ..kv_format import LayerPages
from . import cases
from .cases import Size, coded

PADDING = 3  # tokens at the end that have no slot
FEW = Size(6, 3, 2, 128, 64, 3, 8)


def _padded(case: Case) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        *heads, slots, pages = case.make(dtype)
        return *heads, torch.cat([slots[:-PADDING], torch.full((PADDING,), -1)]), pages

    return replace(case, name=f"padded, {case.name}", make=make)


def _expected_padded(*arguments: Tensor | LayerPages) -> Results:
    """All queries turned; the pages as if there were no padding."""
    *heads, slots, pages = arguments
    query = cases.by_reference(*heads, slots.clamp(min=0), pages)[0]
    return query, *cases.by_reference(*(tensor[:-PADDING] for tensor in (*heads, slots)), pages)[1:]


SMALL = Op(
    name="rotate_write",
    run=cases.run_bits,
    expected=cases.by_reference,
    tolerance=cases.FORMATS_OP.tolerance,
    cases=(
        coded("few tokens", FEW, "float32", "float32"),
        *(
            coded(f"few heads of {width}", replace(FEW, width=width, half=width // 2), name, name)
            for name in cases.QUANTISED
            for width in (33, 80, 128)
        ),
        coded("few tokens", FEW, "int4", "fp8"),
    ),
)
PADDED = Op(
    name="rotate_write",
    run=cases.run_bits,
    expected=_expected_padded,
    tolerance=cases.FORMATS_OP.tolerance,
    cases=(_padded(coded("few tokens", FEW, "fp8", "int4")),),
)
