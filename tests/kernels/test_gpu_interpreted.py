"""Every small case of the Triton kernels against its truth, computed by Triton's interpreter in one process beside."""

import pytest
from interpreted import outcomes, plan


@pytest.mark.parametrize(("op", "case", "dtype"), plan())
def test_case(op: str, case: str, dtype: str) -> None:
    outcome = outcomes()[op, case, dtype]
    assert not outcome.error
    assert outcome.off <= 1
