"""Quantised linears beyond their cases: what a batch must not change, numbers not finite, layouts, refusals."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from backends import NATIVE, each_backend

from batchgen.engine.balance import balancing
from batchgen.engine.weights.quantise import to_int8
from batchgen.kernels import Kernels
from batchgen.kernels.case import normal
from batchgen.kernels.linear_fp8.cases import make_weight as fp8
from batchgen.kernels.linear_int4 import Int4Weight, packed, unpacked
from batchgen.kernels.linear_int4.cases import make_weight as int4
from batchgen.kernels.linear_int8 import Int8Weight
from batchgen.kernels.linear_int8.cases import make_weight as int8
from batchgen.kernels.panels import SEGMENT, can_turn, segment_of
from batchgen.kernels.panels.cases import Form
from batchgen.kernels.panels.reference import quantise, rounded

INT8 = int8(51, 100, Form(32))
INT4 = int4(51, 100, Form(32))


def both(kernels: Kernels, x: torch.Tensor) -> list[torch.Tensor]:
    return [
        kernels.linear_int8(x, kernels.pack_int8(INT8), None, torch.float32),
        kernels.linear_int4(x, kernels.pack_int4(INT4), None, torch.float32),
    ]


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
def test_a_row_does_not_see_its_neighbours(kernels: Kernels) -> None:
    """Bit for bit: the number of rows and the place in a batch change no answer."""
    x = normal((23, 100), torch.float32, 1)
    whole = both(kernels, x)
    for start, count in ((0, 1), (3, 1), (5, 6), (22, 1), (7, 11)):
        for result, expected in zip(both(kernels, x[start : start + count]), whole, strict=True):
            assert torch.equal(result, expected[start : start + count])


@each_backend
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_alone(kernels: Kernels, value: float) -> None:
    x = normal((9, 100), torch.float32, 1)
    expected = both(kernels, x)
    x[4, 99] = value
    for result, clean in zip(both(kernels, x), expected, strict=True):
        assert result[4].isnan().all()
        others = torch.arange(9) != 4
        torch.testing.assert_close(result[others], clean[others])


@each_backend
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["scale", "minimum"])
@pytest.mark.parametrize("weight", [INT8, INT4], ids=["int8", "int4"])
def test_scales_that_are_not_finite_spoil_their_output_alone(
    kernels: Kernels, weight: Int8Weight | Int4Weight, name: str, value: float
) -> None:
    """Damaged checkpoints hold such; they were read as 65,536 and more, and answers were made of them."""
    pack, product = (
        (kernels.pack_int8, kernels.linear_int8) if weight is INT8 else (kernels.pack_int4, kernels.linear_int4)
    )
    x, damaged = normal((9, 100), torch.float32, 1), getattr(weight, name).clone()
    assert damaged.dtype == torch.float16
    damaged[7, 1] = value
    expected = product(x, pack(weight), None, torch.float32)
    result = product(x, pack(replace(weight, **{name: damaged})), None, torch.float32)
    assert not result[:, 7].isfinite().any()
    others = torch.arange(51) != 7
    torch.testing.assert_close(result[:, others], expected[:, others])


@each_backend
def test_nothing_gives_nothing(kernels: Kernels) -> None:
    x = torch.zeros(3, 100)
    x[1] = 1e-38
    for result in both(kernels, x):
        assert torch.equal(result, torch.zeros(3, 51))
    assert [result.shape for result in both(kernels, x[:0])] == [(0, 51), (0, 51)]


@each_backend
@pytest.mark.parametrize("code", [-128, 127])
def test_the_largest_sums_do_not_overflow(kernels: Kernels, code: int) -> None:
    weight = Int8Weight(torch.full((17, 20_000), code, dtype=torch.int8), torch.ones(17, 1), None, 20_000)
    out = kernels.linear_int8(torch.full((2, 20_000), -127.0), kernels.pack_int8(weight), None, torch.float32)
    torch.testing.assert_close(out, torch.full((2, 17), -127.0 * 20_000 * code), rtol=1e-4, atol=0.0)


@each_backend
def test_strided_rows_and_another_number_type(kernels: Kernels) -> None:
    x = normal((6, 250), torch.bfloat16, 2)
    expected = both(kernels, x[:, 50:150].contiguous())
    for result, same in zip(both(kernels, x[:, 50:150]), expected, strict=True):
        assert result.dtype == torch.float32
        assert torch.equal(result, same)


@each_backend
@pytest.mark.parametrize("group", [16, 32, 0])
def test_rows_apart_are_rounded_as_rows_side_by_side(kernels: Kernels, group: int) -> None:
    """Whole segments that lie one behind the other are rounded together, across rows too."""
    weight = kernels.pack_int8(int8(33, 96, Form(group)))
    x = normal((7, 300), torch.bfloat16, 2)[:, 50:146]
    apart, together = (kernels.linear_int8(rows, weight, None, torch.float32) for rows in (x, x.contiguous()))
    assert torch.equal(apart, together)


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
def test_threads_change_no_answer(kernels: Kernels) -> None:
    """Rows are rounded by all threads before one of them multiplies."""
    x = normal((90, 576), torch.bfloat16, 1)
    calls = [
        partial(kernels.linear_int8, x, kernels.pack_int8(int8(150, 576, Form()))),
        partial(kernels.linear_int4, x, kernels.pack_int4(int4(150, 576, Form(32)))),
        partial(kernels.linear_fp8, x, kernels.pack_fp8(fp8(150, 576, Form()))),
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [call(None, torch.float32) for call in calls]
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for _ in range(5):
                for call, expected in zip(calls, alone, strict=True):
                    assert torch.equal(call(None, torch.float32), expected)
    finally:
        torch.set_num_threads(before)


@each_backend
@pytest.mark.parametrize("group", [16, 32, 64, 0])
@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_of_a_packed_weight(kernels: Kernels, group: int, symmetric: bool) -> None:
    rows = torch.tensor([50, 0, 17, 17, 15])
    turned = (int8(51, 128, Form(minimum=False, turned=True, balanced=balanced)) for balanced in (False, True))
    for weight in (int8(51, 102, Form(group)), int8(51, 101, Form(group, minimum=False)), *turned):
        check_rows(kernels, kernels.pack_int8(weight), weight.values()[rows], rows)
    weight4 = int4(51, 102, Form(group, symmetric=symmetric))
    check_rows(kernels, kernels.pack_int4(weight4), weight4.values()[rows], rows)
    for size in (0, 6, 200):
        weight8 = fp8(51, 103 - size % 2, Form(size, half=False, minimum=False))
        check_rows(kernels, kernels.pack_fp8(weight8), weight8.values()[rows], rows)


def check_rows(kernels: Kernels, packed: Any, expected: torch.Tensor, rows: torch.Tensor) -> None:
    """As numbers of any type; sums of a turned weight may be made in another order."""
    assert torch.equal(packed.values(rows), expected)
    found = kernels.weight_rows(packed, rows, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(kernels.weight_rows(packed, rows, dtype), found.to(dtype))
    assert kernels.weight_rows(packed, rows[:0], torch.bfloat16).shape == (0, expected.shape[1])


def test_bytes_and_nibbles() -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert unpacked(bytes_)[1, :4].tolist() == [0, 8, 1, 8]
    assert torch.equal(packed(unpacked(bytes_)), bytes_)


@pytest.mark.parametrize(
    ("group", "inputs", "segment"),
    [(32, 576, 32), (128, 576, SEGMENT), (16, 576, 16), (40, 200, 8), (576, 576, SEGMENT), (7, 3, SEGMENT)],
)
def test_segments(group: int, inputs: int, segment: int) -> None:
    assert segment_of(group, inputs) == segment


@pytest.mark.parametrize(("inputs", "segment"), [(64, 64), (576, 192), (1536, 256), (896, 128), (320, 64)])
def test_segments_of_turned_weights(inputs: int, segment: int) -> None:
    assert can_turn(inputs)
    assert segment_of(inputs, inputs, turned=True) == segment


@each_backend
def test_turning_spreads_a_number_that_stands_out(kernels: Kernels) -> None:
    x, values = normal((5, 192), torch.float32, 1), normal((48, 192), torch.float32, 2, 0.1)
    x[:, 100] *= 30
    values[:, 7] *= 30
    exact = x @ values.T

    def lost(turn: bool) -> float:
        out = kernels.linear_int8(x, kernels.pack_int8(to_int8(values, turn=turn)), None, torch.float32)
        return float((out - exact).square().mean().sqrt())

    assert lost(turn=True) < lost(turn=False) / 3


@each_backend
def test_a_balanced_weight_errs_less_where_an_input_is_strong(kernels: Kernels) -> None:
    x, values = normal((50, 192), torch.float32, 1), normal((48, 192), torch.float32, 2, 0.1)
    x[:, 100] *= 30
    exact = x @ values.T

    def lost(balance: torch.Tensor | None) -> float:
        weight = to_int8(values, turn=True, balance=balance)
        out = kernels.linear_int8(x, kernels.pack_int8(weight), None, torch.float32)
        return float((out - exact).square().mean().sqrt())

    assert lost(balancing(values, x)) < lost(None) / 1.5


@each_backend
def test_a_token_of_a_turned_weight_that_is_not_finite(kernels: Kernels) -> None:
    x = normal((9, 192), torch.float32, 1)
    weight = kernels.pack_int8(int8(51, 192, Form(half=False, minimum=False, turned=True)))
    fine = kernels.linear_int8(x, weight, None, torch.float32)
    x[4, 5] = torch.inf
    out = kernels.linear_int8(x, weight, None, torch.float32)
    assert out[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(out[others], fine[others])


@each_backend
@pytest.mark.parametrize("group", [1, 2, 30, 33])
def test_a_group_size_that_does_not_fit_is_refused(kernels: Kernels, group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} inputs"):
        kernels.pack_int8(int8(3, 100, Form(group)))
    with pytest.raises(ValueError, match=f"groups of {group} inputs"):
        kernels.pack_int4(int4(3, 100, Form(group)))


def test_rounding_of_activations_by_hand() -> None:
    x = torch.tensor([[0.5, -1.0, 0.25, 1e-4, *[0.0] * (SEGMENT - 4), 3.0]])
    codes, scale = quantise(x)
    assert codes[0, 0, :4].tolist() == [64, -127, 32, 0]
    assert codes[0, 1, :2].tolist() == [127, 0]
    assert scale.tolist() == [[1 / 127, 3 / 127]] or torch.allclose(scale, torch.tensor([[1 / 127, 3 / 127]]))
    assert (rounded(x) - x).abs().max() <= 0.5 * 3 / 127


def test_int4_shape() -> None:
    assert INT4.shape == (51, 100)
    assert isinstance(INT4, Int4Weight)
