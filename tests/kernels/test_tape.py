"""Calls put on a tape: nothing runs before it plays, it plays fewer tokens too, and what it cannot hold is refused."""

import gc
import threading

import pytest
import torch
from backends import NATIVE

from batchgen.kernels.case import normal
from batchgen.kernels.native.tape import Memory, NotRecordableError, Tape, empty
from batchgen.kernels.tables import NativeKernels

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native library was built")
each_library = pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
WEIGHT = normal((48, 64), torch.bfloat16, 1)


@each_library
def test_a_tape_plays_what_lies_in_its_buffers_for_any_fewer_tokens(kernels: NativeKernels) -> None:
    x, ones = (torch.ones(size, dtype=torch.bfloat16) for size in ((9, 64), (64,)))
    weight = kernels.pack_dense(WEIGHT, None)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return kernels.swiglu(kernels.linear(kernels.rms_norm(rows, ones, 1e-5), weight))

    tape = Tape(Memory())
    out = tape.record(lambda: compute(x))
    for count in (9, 1, 4):
        x.copy_(normal((9, 64), torch.bfloat16, count))
        out.fill_(7)
        tape.play(kernels._library, {9: count})
        assert torch.equal(out[:count], compute(x[:count].clone()))
        assert (out[count:] == 7).all()


@each_library
@pytest.mark.parametrize(("tokens", "taken"), [(9, 5), (9, 1), (4, 0), (1, 1)])
def test_calls_for_some_of_the_rows_are_counted_by_themselves(kernels: NativeKernels, tokens: int, taken: int) -> None:
    x, weight = normal((9, 64), torch.float32, 1), torch.ones(64)
    index = torch.tensor([8, 0, 3, 3, 1]) % tokens
    tape = Tape(Memory())
    out = tape.record(lambda: kernels.swiglu(kernels.take_rows(kernels.rms_norm(x, weight, 1e-5), index)))
    out.fill_(7)
    tape.play(kernels._library, {9: tokens, 5: taken})
    assert torch.equal(out[:taken], kernels.swiglu(kernels.rms_norm(x, weight, 1e-5)[index[:taken]]))
    assert (out[taken:] == 7).all()


@each_library
def test_recording_runs_nothing(kernels: NativeKernels) -> None:
    residual, x, weight = torch.ones(3, 64), torch.ones(3, 64), torch.ones(64)
    tape = Tape(Memory())
    tape.record(lambda: kernels.add_rms_norm(residual, x, weight, 1e-5))
    assert torch.equal(residual, torch.ones(3, 64))
    tape.play(kernels._library, {3: 2})
    assert residual[:, 0].tolist() == [2, 2, 1]


@each_library
def test_what_torch_computes_is_refused_and_recording_ends(kernels: NativeKernels) -> None:
    x, weight = torch.ones(3, 64), torch.ones(64)
    for beside in (
        lambda y: y + 1,
        lambda y: y.T.contiguous(),
        lambda y: y.add_(1),
        lambda y: y[torch.arange(2)],
        lambda y: torch.empty_like(y),
        lambda y: y.double(),
    ):
        with pytest.raises(NotRecordableError):
            Tape(Memory()).record(lambda beside=beside: beside(kernels.rms_norm(x, weight, 1e-5)))
    with pytest.raises(ZeroDivisionError):
        Tape(Memory()).record(lambda: torch.empty(1 // 0))
    assert torch.equal(kernels.rms_norm(x, weight, 0.0), torch.ones(3, 64))


@each_library
def test_views_are_no_computation(kernels: NativeKernels) -> None:
    x, weight = normal((3, 128), torch.float32, 1), torch.ones(64)
    tape = Tape(Memory())
    out = tape.record(lambda: kernels.rms_norm(x.view(3, 2, 64).split_with_sizes([1, 1], 1)[1], weight, 1e-5))
    tape.play(kernels._library, {3: 3})
    assert torch.equal(out, kernels.rms_norm(x.view(3, 2, 64)[:, 1:], weight, 1e-5))


def test_memory_is_taken_again_when_the_last_view_is_gone() -> None:
    memory = Memory()
    first = memory.empty((4, 16), torch.float32)
    place, view = first.data_ptr(), first[2:]
    assert place % 64 == 0
    del first
    gc.collect()
    assert memory.empty((4, 16), torch.float32).data_ptr() != place
    del view
    gc.collect()
    assert place in {tensor.data_ptr() for tensor in [memory.empty((8, 8), torch.float32) for _ in range(2)]}


@each_library
def test_another_thread_computes_while_one_records(kernels: NativeKernels) -> None:
    results: list[torch.Tensor] = []

    def compute() -> torch.Tensor:
        beside = threading.Thread(target=lambda: results.append(kernels.swiglu(torch.ones(2, 8))))
        beside.start()
        beside.join()
        return empty((1,), torch.float32)

    Tape(Memory()).record(compute)
    assert torch.equal(results[0], kernels.swiglu(torch.ones(2, 8)))
