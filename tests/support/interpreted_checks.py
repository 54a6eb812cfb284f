"""What the cases do not ask of the Triton kernels, run beside them in the interpreter. A check that fails raises."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from batchgen.kernels.attention import cases as attention
from batchgen.kernels.attention import format_cases
from batchgen.kernels.attention.case_steps import decode, decode_shared, prefill
from batchgen.kernels.attention.cases import Shape
from batchgen.kernels.case import error, normal
from batchgen.kernels.chip import Chip
from batchgen.kernels.gpu_table import GpuKernels
from batchgen.kernels.grouped.choice import Choice, Key
from batchgen.kernels.kv_format import FORMATS
from batchgen.kernels.linear_fp8.cases import make_weight as fp8
from batchgen.kernels.linear_int4 import cases as linear_int4
from batchgen.kernels.linear_int4.cases import make_weight as int4
from batchgen.kernels.linear_int8.cases import make_weight as int8
from batchgen.kernels.panels.cases import Form
from batchgen.kernels.sampling import Filters, cases, gpu
from batchgen.kernels.sampling.reference import take_rows


def _pool() -> tuple[torch.Tensor, Filters]:
    """Rows of all kinds: greedy, filtered by each filter and by all, free, flat, tied, broken."""
    logits = cases.some_logits(9, 900)
    logits[3] = (logits[3] * 4).round() / 4
    logits[5] = 0.0
    logits[7, 11], logits[8] = torch.nan, -torch.inf
    values = {"temperature": [0.0, 1.0, 0.7], "top_k": [0, 40, 0, 600], "top_p": [1.0, 0.3], "min_p": [0.0, 0.0, 0.05]}
    return logits, cases.filters(9, **values)


def rows_too_flat_for_the_scratch_are_searched_whole(kernels: Any) -> None:
    """With room for few candidates every filter draws the same."""
    logits, filters = _pool()
    expected, ranked = kernels.sample(logits, filters), kernels.logprobs(logits[:6], torch.arange(6), 9)
    room = gpu.MOST_CANDIDATES
    gpu.MOST_CANDIDATES = 8
    try:
        assert torch.equal(kernels.sample(logits, filters), expected)
        for part, whole in zip(kernels.logprobs(logits[:6], torch.arange(6), 9), ranked, strict=True):
            assert torch.equal(part, whole)
    finally:
        gpu.MOST_CANDIDATES = room


def broken_rows_give_some_id(kernels: Any) -> None:
    logits, filters = _pool()
    tokens = kernels.sample(logits, filters)
    assert ((tokens >= 0) & (tokens < 900)).all()
    _, _, ids = kernels.logprobs(logits, torch.full((9,), 5), 4)
    assert ((ids >= 0) & (ids < 900)).all()
    assert kernels.finite(logits).tolist() == [row not in (7, 8) for row in range(9)]


def a_row_does_not_depend_on_its_company(kernels: Any) -> None:
    logits, filters = _pool()
    expected = kernels.sample(logits, filters)
    rows = torch.tensor([4, 1, 1, 6, 3])
    assert torch.equal(kernels.sample(logits[rows], take_rows(filters, rows)), expected[rows])


def logits_in_a_wider_head_are_read_by_their_rows(kernels: Any) -> None:
    logits, filters = _pool()
    wide = torch.full((9, 1000), 50.0)
    wide[:, :900] = logits
    assert torch.equal(kernels.sample(wide[:, :900], filters), kernels.sample(logits, filters))
    assert torch.equal(kernels.finite(wide[:, :900]), kernels.finite(logits))


def sinks_take_nothing_or_all(kernels: Any) -> None:
    """For results that are whole, split, and of a shared prefix."""
    for step in (decode(2, 40), decode(1, 600), decode_shared(96, 3), prefill(30, 40)):
        *arguments, masking = attention.make(step, Shape(4, 2, 32), torch.float32)
        without = attention.run(kernels, *arguments, masking)[0]
        sinks = torch.tensor([-torch.inf, -1e4, 1e4, -1e4])
        out = attention.run(kernels, *arguments, replace(masking, sinks=sinks))[0]
        assert not out[:, 2].any()
        assert torch.equal(out[:, [0, 1, 3]], without[:, [0, 1, 3]])


def nothing_gives_nothing(kernels: Any) -> None:
    assert kernels.sample(torch.zeros(0, 50), cases.filters(0)).shape == (0,)
    assert [tuple(part.shape) for part in kernels.logprobs(torch.zeros(0, 50), torch.zeros(0).long(), 3)] == [
        (0,), (0, 3), (0, 3)
    ]  # fmt: skip
    for packed, op in _linears(kernels):
        assert op(torch.zeros(0, 256), packed, None, torch.float32).shape == (0, 51)
        assert torch.equal(op(torch.zeros(3, 256), packed, None, torch.float32), torch.zeros(3, 51))


def a_row_that_is_not_finite_leaves_the_others_alone(kernels: Any) -> None:
    x = normal((9, 256), torch.float32, 1)
    clean = [op(x, packed, None, torch.float32) for packed, op in _linears(kernels)]
    x[4, 99] = torch.nan
    others = torch.arange(9) != 4
    for (packed, op), expected in zip(_linears(kernels), clean, strict=True):
        out = op(x, packed, None, torch.float32)
        assert out[4].isnan().all()
        assert torch.equal(out[others], expected[others])


def strided_rows_and_another_result_type(kernels: Any) -> None:
    x = normal((5, 600), torch.float16, 1)
    for packed, op in _linears(kernels):
        result = op(x[:, 40:296], packed, None, torch.float32)
        assert result.dtype == torch.float32
        assert torch.equal(result, op(x[:, 40:296].contiguous(), packed, None, torch.float32))


class Always(dict[Key, Choice]):
    """One choice for every product, as if it had been tuned."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self._choice = choice

    def get(self, key: Key, default: Any = None) -> Choice:
        return self._choice


ROOMY_TILES = (Choice("tiles", 64, 128), Choice("split", 64, 128))  # whose sums are added behind the loop


def every_way_of_a_4_bit_product_leads_there(kernels: Any) -> None:
    """Few tokens, many and very many, with activations as 8-bit floats and as they are."""
    op, x = linear_int4.OP, normal((21, 1100), torch.float32, 1)
    for form in (Form(32), Form(64, symmetric=True), Form(128, half=False), Form(half=False)):
        weight = int4(51, 1100, form)
        for chip in (Chip((8, 0), library=False), Chip((8, 9), library=False)):
            for choice in (Choice("tiles", 32, 64), Choice("split", 16, 64), *ROOMY_TILES, Choice("dense")):
                table = GpuKernels(chip, Always(choice))
                (found,), (truth,) = op.run(table, x, weight, None), op.truth(table, (x, weight, None))
                assert error(found, truth) <= op.tolerance[torch.float32], (form, chip, choice)


def rows_of_a_packed_weight_come_back(kernels: Any) -> None:
    rows = torch.tensor([50, 0, 17, 17, 15])
    for group in (0, 8, 16, 32, 48, 64, 128):
        form = Form(group)
        for weight, pack in (
            (int4(51, 256, form), kernels.pack_int4),
            (int4(51, 202, Form(group, symmetric=True)), kernels.pack_int4),
            (int8(51, 201, form), kernels.pack_int8),
            (int8(51, 200, Form(group, minimum=False)), kernels.pack_int8),
            (fp8(51, 256, Form(group, half=False, minimum=False)), kernels.pack_fp8),
        ):
            assert torch.equal(pack(weight).values(rows), weight.values()[rows])


def small_values_are_attended_as_closely_in_half_precision(kernels: Any) -> None:
    """Scales below what float16 holds as a normal number, and some of zero."""
    for name in format_cases.QUANTISED:
        formats = (FORMATS[name], FORMATS[name])
        query, pages, items, masking = format_cases.make(decode(2, 100), Shape(4, 2, 64), formats, torch.float16)
        pages.values.scales.mul_(1e-3)[:, ::3] = 0
        (expected,) = format_cases.expected(query, pages, items, masking)
        (out,) = format_cases.run(kernels, query, pages, items, masking)
        off = float((out - expected).abs().max() / expected.abs().max())
        assert off < 1.5e-3, (name, off)


def _linears(kernels: Any) -> list[tuple[Any, Callable[..., torch.Tensor]]]:
    """Every kind of product: activations as they are with and without a minimum, codes of a token, and of groups."""
    channel = Form(half=False, minimum=False)
    blocks = fp8(51, 256, Form(128, half=False, minimum=False))
    return [
        (kernels.pack_int4(int4(51, 256, Form(32))), kernels.linear_int4),
        (kernels.pack_int4(int4(51, 256, Form(64, symmetric=True))), kernels.linear_int4),
        (kernels.pack_int8(int8(51, 256, Form(32))), kernels.linear_int8),
        (kernels.pack_int8(int8(51, 256, channel)), kernels.linear_int8),
        (kernels.pack_fp8(fp8(51, 256, channel)), kernels.linear_fp8),
        (kernels.pack_fp8(blocks), kernels.linear_fp8),
    ]


CHECKS: tuple[Callable[[Any], None], ...] = (
    rows_too_flat_for_the_scratch_are_searched_whole,
    broken_rows_give_some_id,
    a_row_does_not_depend_on_its_company,
    logits_in_a_wider_head_are_read_by_their_rows,
    sinks_take_nothing_or_all,
    nothing_gives_nothing,
    a_row_that_is_not_finite_leaves_the_others_alone,
    strided_rows_and_another_result_type,
    every_way_of_a_4_bit_product_leads_there,
    rows_of_a_packed_weight_come_back,
    small_values_are_attended_as_closely_in_half_precision,
)
