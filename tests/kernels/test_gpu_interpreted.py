"""Every small case of the Triton kernels against its truth, computed by Triton's interpreter in one process beside."""

import pytest
from interpreted import outcomes, plan
from interpreted_checks import CHECKS


@pytest.mark.parametrize(("op", "case", "dtype", "chip"), plan())
def test_case(op: str, case: str, dtype: str, chip: str) -> None:
    outcome = outcomes()[op, case, dtype, chip]
    assert not outcome.error
    assert outcome.off <= 1


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_check(name: str) -> None:
    assert not outcomes()["check", name, "", ""].error
