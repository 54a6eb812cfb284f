"""The whole step of a CUDA device without one: no host tensor in its way, no value waited for, no grid too large."""

import shutil

import fake_cuda
import pytest
import torch

from batchgen.kernels.launch import Launch

pytestmark = pytest.mark.slow

PRODUCTS = {"native": "aten::linear", "int8": "aten::_int_mm", "fp8": "aten::_scaled_mm", "int4": "aten::linear"}
ALL = {"attend", "turn_and_store", "normalise", "gate", "draw_from_all", "gather_candidates", "penalise_entries"}
ALL |= {"copy_words"}  # of blocks in which prompts part


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch knows real devices")
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_steps_are_launched_and_recorded_in_every_format() -> None:
    found = fake_cuda.outcomes()
    assert set(found) == set(fake_cuda.MODELS)
    for (_, weights, _), one in found.items():
        assert one.errors == []
        assert one.recorded >= 2
        assert one.replayed >= 10
        assert set(one.kernels) >= ALL
        assert PRODUCTS[weights] in one.products


def test_a_tensor_on_the_host_may_not_be_captured() -> None:
    watch = fake_cuda.Watch()
    with watch, watch.capture(), pytest.raises(AssertionError, match="on cpu"):
        torch.zeros(2)


def test_a_value_may_not_be_asked_for_while_a_step_is_launched() -> None:
    watch, held = fake_cuda.Watch(), torch.ones(3)
    watch.launching = True
    for ask in (held.sum().item, held.nonzero, lambda: held[held > 0]):
        with watch, pytest.raises(AssertionError, match="asks for a value"):
            ask()


class Kernel:
    def fn(self) -> None:
        return None


@pytest.mark.parametrize(("grid", "argument"), [((4, 70_000), 1), ((2**31,), 1), ((4,), torch.zeros(1))])
def test_launches_are_looked_at(grid: tuple[int, ...], argument: object) -> None:
    with pytest.raises(AssertionError, match=r"grid|on cpu"):
        fake_cuda.Watch().run(Launch(Kernel, grid, (argument,), {}))
