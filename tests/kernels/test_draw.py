"""Draws from a linear beyond its cases: many rows and threads, and logits that are no numbers."""

from dataclasses import replace

import pytest
import torch
from backends import NATIVE, each_backend

from batchgen.kernels import Kernels
from batchgen.kernels.case import normal
from batchgen.kernels.draw import DrawnLinear
from batchgen.kernels.draw.cases import MakeHead, dense, fp8, int4, int8
from batchgen.kernels.draw.reference import draw
from batchgen.kernels.sampling.cases import filters

each_kind = pytest.mark.parametrize("make", [dense, int8, int4, fp8])


def head_of(kernels: Kernels, weight: torch.Tensor, bias: list[float]) -> DrawnLinear:
    packed = kernels.pack_dense(weight, torch.tensor(bias, dtype=weight.dtype))
    return DrawnLinear(lambda x: kernels.linear(x, packed), packed, packed.bias, weight.dtype, len(bias))


@each_kind
@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
def test_the_tokens_are_those_of_kept_logits(kernels: Kernels, make: MakeHead) -> None:
    """Bit for bit, in whatever order threads come upon equal logits."""
    before = torch.get_num_threads()
    head = make(kernels, 3000, 192, 2990, torch.bfloat16)
    try:
        for rows in (1, 6, 64, 259):
            x, temperatures = normal((rows, 192), torch.bfloat16, rows), filters(rows, temperature=[0.0, 1.0, 0.4])
            tokens, finite = draw(kernels, x, head, temperatures)
            assert finite.all()
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found = kernels.draw(x, head, temperatures)
                assert torch.equal(found[0], tokens)
                assert found[1].all()
    finally:
        torch.set_num_threads(before)


@each_backend
def test_equal_logits_give_the_lowest_id(kernels: Kernels) -> None:
    for bias in ([0.0] * 100, [-1.0] * 40 + [3.0] * 60, [-2.0] * 100, [-2.0] * 37 + [-1.0, -3.0, -1.0]):
        head = head_of(kernels, torch.zeros(len(bias), 8, dtype=torch.bfloat16), bias)
        tokens, finite = kernels.draw(torch.ones(3, 8, dtype=torch.bfloat16), head, filters(3, temperature=[0.0]))
        assert tokens.tolist() == [bias.index(max(bias))] * 3
        assert finite.all()


@pytest.mark.parametrize(("outputs", "equal"), [(3000, (1480, 1520)), (16_000, (40, 1600))])
@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
def test_equal_logits_far_from_0_give_the_lowest_id(kernels: Kernels, outputs: int, equal: tuple[int, int]) -> None:
    """There the sum with the noise is rounded to the same number, whichever thread comes upon it first."""
    before = torch.get_num_threads()
    rows, bias = 256, [18.5 if id in equal else 0.0 for id in range(outputs)]
    head = head_of(kernels, torch.zeros(outputs, 8, dtype=torch.bfloat16), bias)
    x, chosen = torch.ones(rows, 8, dtype=torch.bfloat16), filters(rows, temperature=[1e-6])
    try:
        torch.set_num_threads(1)
        expected, _ = kernels.draw(x, head, chosen)
        torch.set_num_threads(2)
        for _ in range(20):
            assert torch.equal(kernels.draw(x, head, chosen)[0], expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
@each_kind
def test_what_does_not_fit_the_weight_is_refused(kernels: Kernels, make: MakeHead) -> None:
    head, chosen = make(kernels, 400, 192, 390, torch.bfloat16), filters(2, temperature=[0.0])
    with pytest.raises(ValueError, match="390 outputs of rows of 184 by a weight of 400 x 192"):
        kernels.draw(torch.ones(2, 184, dtype=torch.bfloat16), head, chosen)
    with pytest.raises(ValueError, match="500 outputs"):
        kernels.draw(torch.ones(2, 192, dtype=torch.bfloat16), replace(head, vocabulary=500), chosen)


@each_backend
@each_kind
def test_a_row_that_is_not_finite_is_told(kernels: Kernels, make: MakeHead) -> None:
    x = normal((8, 192), torch.bfloat16, 4)
    whole = filters(8, temperature=[0.0, 1.0])
    head = make(kernels, 400, 192, 390, torch.bfloat16)
    expected, _ = kernels.draw(x, head, whole)
    x[2, 5], x[5] = torch.nan, torch.nan
    tokens, finite = kernels.draw(x, head, whole)
    assert finite.tolist() == [row not in (2, 5) for row in range(8)]
    assert torch.equal(tokens[finite], expected[finite])
    assert all(0 <= token < 390 for token in tokens.tolist())


@each_backend
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_infinite_logits(kernels: Kernels, temperature: float) -> None:
    """One of +inf, or -inf alone, is told; some of -inf are not drawn; none behind the vocabulary matters."""
    infinity = float("inf")
    for bias, vocabulary, fine in (
        ([0.0] * 40 + [infinity] + [0.0] * 59, 100, False),
        ([0.0] * 40 + [infinity] + [0.0] * 59, 40, True),
        ([-infinity] * 100, 100, False),
        ([-infinity] * 99 + [-500.0], 100, True),
        ([-infinity] * 40 + [1.0] * 60, 40, False),
    ):
        head = head_of(kernels, torch.zeros(100, 8, dtype=torch.bfloat16), bias)
        head = replace(head, vocabulary=vocabulary)
        x, chosen = torch.ones(3, 8, dtype=torch.bfloat16), filters(3, temperature=[temperature])
        tokens, finite = kernels.draw(x, head, chosen)
        assert finite.tolist() == [fine] * 3
        assert all(0 <= token < vocabulary for token in tokens.tolist())
        assert not fine or all(bias[token] > -infinity for token in tokens.tolist())


@each_backend
def test_no_rows(kernels: Kernels) -> None:
    head = dense(kernels, 100, 192, 100, torch.bfloat16)
    tokens, finite = kernels.draw(torch.zeros(0, 192, dtype=torch.bfloat16), head, filters(0, temperature=[0.0]))
    assert tokens.shape == finite.shape == (0,)
