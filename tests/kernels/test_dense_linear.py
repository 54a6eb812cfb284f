"""The dense linear beyond its cases: what a batch must not change, rows given back, numbers that are not finite."""

import pytest
import torch
from backends import NATIVE, each_backend

from batchgen.kernels import Kernels
from batchgen.kernels.case import normal

DTYPES = [torch.float32, torch.bfloat16]
WEIGHT, BIAS = normal((51, 101), torch.bfloat16, 2), normal((51,), torch.bfloat16, 3)


def product(kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
    return kernels.linear(x, kernels.pack_dense(WEIGHT.to(x.dtype), BIAS.to(x.dtype)))


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
def test_a_row_does_not_see_its_neighbours(kernels: Kernels) -> None:
    """Bit for bit: the number of rows and the place in a batch change no answer."""
    x = normal((23, 101), torch.bfloat16, 1)
    whole = product(kernels, x)
    for start, count in ((0, 1), (3, 1), (5, 6), (22, 1), (7, 11)):
        assert torch.equal(product(kernels, x[start : start + count]), whole[start : start + count])


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
def test_threads_change_no_answer(kernels: Kernels) -> None:
    """An odd number of inputs is copied by all threads before one of them multiplies."""
    before = torch.get_num_threads()
    try:
        for inputs in (576, 577):
            x = normal((90, inputs), torch.bfloat16, 1)
            packed = kernels.pack_dense(normal((150, inputs), torch.bfloat16, 2), None)
            torch.set_num_threads(1)
            alone = kernels.linear(x, packed)
            for threads in (2, 3, 5):
                torch.set_num_threads(threads)
                assert all(torch.equal(kernels.linear(x, packed), alone) for _ in range(5))
    finally:
        torch.set_num_threads(before)


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_packed_weight(kernels: Kernels, dtype: torch.dtype) -> None:
    rows, weight = torch.tensor([50, 0, 17, 17, 15]), WEIGHT.to(dtype)
    packed = kernels.pack_dense(weight, None)
    assert torch.equal(packed.values(rows), weight[rows])
    for other in (torch.float32, torch.bfloat16):
        assert torch.equal(kernels.weight_rows(packed, rows, other), weight[rows].to(other))


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    x = normal((6, 303), dtype, 2)[:, 101:202]
    torch.testing.assert_close(product(kernels, x), product(kernels, x.contiguous()))
    across = normal((101, 6), dtype, 2).T
    torch.testing.assert_close(product(kernels, across), product(kernels, across.contiguous()))


@each_backend
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_so_alone(kernels: Kernels, value: float) -> None:
    x = normal((9, 101), torch.bfloat16, 1)
    expected = product(kernels, x)
    x[4, 100] = value
    found = product(kernels, x)
    assert not found[4].isfinite().any()
    others = torch.arange(9) != 4
    torch.testing.assert_close(found[others], expected[others])


@each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_give_no_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    empty = product(kernels, torch.empty(0, 101, dtype=dtype))
    assert (empty.shape, empty.dtype) == ((0, 51), dtype)
