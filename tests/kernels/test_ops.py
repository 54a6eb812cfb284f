"""Every op, every case, every backend against the naive float64 truth of the case."""

import inspect

import pytest
import torch
from backends import BACKENDS, each_backend

from batchgen.kernels import Kernels, load
from batchgen.kernels.case import Case, Op, error
from batchgen.kernels.cases import OPS

EACH = [
    pytest.param(op, case, dtype, BACKENDS[backend], id=f"{op.name}-{case.name}-{str(dtype)[6:]}-{backend}")
    for op in OPS
    for case in op.cases
    for dtype in op.tolerance
    for backend in BACKENDS
]


def copies(arguments: tuple) -> list[torch.Tensor]:
    return [argument.clone() for argument in arguments if isinstance(argument, torch.Tensor)]


@pytest.mark.parametrize(("op", "case", "dtype", "kernels"), EACH)
def test_op(op: Op, case: Case, dtype: torch.dtype, kernels: Kernels) -> None:
    arguments = case.make(dtype)
    before = copies(arguments)
    results = op.run(kernels, *arguments)
    for result, expected in zip(results, op.truth(kernels, arguments), strict=True):
        assert error(result, expected) <= op.tolerance[dtype]
        assert not result.is_floating_point() or result.dtype == dtype
    for argument, copy in zip(copies(arguments), before, strict=True):
        assert torch.equal(argument.nan_to_num(nan=7.0), copy.nan_to_num(nan=7.0)), "an input was written to"


@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op in OPS for case in op.cases if case.path is not None], ids=lambda part: part.name
)
def test_path(op: Op, case: Case) -> None:
    assert op.path is not None
    assert op.path(*case.make(torch.float32)) == case.path


@each_backend
def test_every_op_of_the_table_has_cases(kernels: Kernels) -> None:
    ops = {name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")}
    packing = {"pack_dense", "pack_int8", "pack_int4", "pack_fp8", "weight_rows"}  # of which linears are tested
    assert ops - packing - {"plan_attention", "rounding", "turns"} == {op.name for op in OPS}
    assert all(callable(getattr(kernels, name)) for name in ops)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device 'abacus:1': no kernels for it \(there are: cpu"):
        load("abacus:1")
