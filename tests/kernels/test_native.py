"""The native library: that it is built and chosen, how a step is cut into tasks, and that threads change no answer."""

import logging
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from backends import NATIVE

from batchgen.kernels import Kernels, load, tables
from batchgen.kernels.attention import AttentionItems, cases
from batchgen.kernels.attention.cases import Shape
from batchgen.kernels.attention.tasks import MAX_LANES, Heads, Tasks, make_tasks
from batchgen.kernels.case import error
from batchgen.kernels.kv_format import MAX_NATIVE_HEAD_DIM
from batchgen.kernels.kv_format.cases import plain_pages
from batchgen.kernels.native import library

each_native = pytest.mark.parametrize("kernels", NATIVE.values(), ids=NATIVE)
STEPS = [*cases.OP.cases, *cases.STEPS.cases]


def test_the_best_library_is_the_cpu_table() -> None:
    """Fails where a compiler is present and the build did not run or did not work."""
    if shutil.which("g++"):
        assert library.available()
    expected = tables.NativeKernels if library.available() else tables.ReferenceKernels
    assert type(load("cpu")) is expected


def test_a_machine_without_libraries_runs_on_the_reference_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tables, "available", lambda: ())
    tables.cpu_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert type(load("cpu")) is type(load("cpu")) is tables.ReferenceKernels
    tables.cpu_kernels.cache_clear()
    assert ["not built" in record.message for record in caplog.records] == [True]


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best, folder = library.available()[0], tmp_path / "native"
    folder.mkdir()
    for name in {"portable", best}:
        shutil.copy(library.FOLDER / f"{name}.so", folder)
    monkeypatch.setattr(library, "FOLDER", folder)
    library.open_library.__wrapped__(best)  # an installed package has no sources beside it
    (tmp_path / "cpu.cpp").write_text("// changed since")
    with pytest.raises(RuntimeError, match=rf"{best}\.so was built from other sources .* run `pip install -e \.`"):
        library.open_library.__wrapped__(best)


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(ValueError, match="native kernels for 'abacus'"):
        tables.NativeKernels("abacus")


def test_torch_sets_the_threads_and_all_of_them_work() -> None:
    opened = library.open_library(library.available()[0])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert opened.batchgen_num_threads() == threads
            assert opened.batchgen_parts_at_once() == threads
    finally:
        torch.set_num_threads(before)


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    kernels = tables.NativeKernels(library.available()[0])
    inputs = [torch.randn(300 + index, 512) for index in range(4)]
    expected = [kernels.rms_norm(x, torch.ones(512), 1e-5) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as pool:
        for _ in range(50):
            found = list(pool.map(lambda x: kernels.rms_norm(x, torch.ones(512), 1e-5), inputs))
            assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    kernels = tables.NativeKernels(library.available()[0])
    x, weight = torch.randn(300, 512), torch.ones(512)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = kernels.rms_norm(x, weight, 1e-5)
        child = os.fork()
        if child == 0:  # compared by numpy: torch's own threads would be waited for in vain here
            os._exit(0 if np.array_equal(kernels.rms_norm(x, weight, 1e-5).numpy(), expected.numpy()) else 1)
    finally:
        torch.set_num_threads(before)
    assert ended(child) == 0


def ended(child: int) -> int:
    """The wait status of a child, which is killed when it hangs."""
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def test_without_a_runtime_the_calling_thread_does_it_all() -> None:
    kernels = tables.NativeKernels(library.available()[0])
    expected = kernels.attention(*_attention_arguments(kernels))
    opened = library.open_library(library.available()[0])
    opened.batchgen_use_threads(None, None)
    try:
        assert opened.batchgen_num_threads() == 1
        assert torch.equal(kernels.attention(*_attention_arguments(kernels)), expected)
    finally:
        library.use_threads_of_torch(opened)


def _attention_arguments(kernels: Kernels) -> tuple:
    query, keys, values, items, masking = cases.make(cases.branching(16), Shape(), torch.float32)
    return query, plain_pages(keys, values), kernels.plan_attention(items, 16), masking


def seen_pairs(items: AttentionItems, tasks: Tasks, block_size: int) -> np.ndarray:
    """How often the tasks show a slot to a query, before the kernel's clipping to its position: [T, slots]."""
    times = np.zeros((len(items.positions), (int(items.blocks.max()) + 1) * block_size), dtype=int)
    columns = (tasks.item, tasks.first_query, tasks.num_queries, tasks.first_key, tasks.num_keys)
    for item, query, num_queries, key, num_keys in zip(*(column.tolist() for column in columns), strict=True):
        slots = cases.key_slots(items, item, block_size)[key : key + num_keys]
        place = items.start[item] + key + np.arange(num_keys)
        for row in items.queries[query : query + num_queries]:
            times[row, slots[place <= items.positions[row]]] += 1
    return times


def heads(query: torch.Tensor, keys: torch.Tensor) -> Heads:
    return Heads(query.shape[1] // keys.shape[0], keys.shape[0], query.shape[2])


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("case", cases.OP.cases, ids=lambda case: case.name)
def test_every_visible_pair_is_in_one_task(case: cases.Case, threads: int) -> None:
    query, keys, _, items, _ = case.make(torch.float32)
    tasks = make_tasks(items, keys.shape[2], heads(query, keys), threads)
    times = seen_pairs(items, tasks, keys.shape[2])
    expected = np.zeros_like(times)
    for row, slots in enumerate(cases.visible_slots(items, keys.shape[2], None)):
        expected[row, slots.numpy()] += 1
    np.testing.assert_array_equal(times, expected)


@pytest.mark.parametrize("threads", [2, 16])
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_tasks_are_bounded_and_ordered(case: cases.Case, threads: int) -> None:
    query, keys, _, items, _ = case.make(torch.float32)
    group = query.shape[1] // keys.shape[0]
    tasks = make_tasks(items, keys.shape[2], heads(query, keys), threads)
    assert (tasks.num_queries * group <= MAX_LANES).all()
    assert (tasks.num_keys > 0).all()
    assert (tasks.first_key % keys.shape[2] == 0).all()
    assert tasks.num_partials == tasks.counts.sum()


def test_one_long_row_is_shared_out_among_threads() -> None:
    items, _ = cases.decode(1, 4000).build()
    assert len(make_tasks(items, 16, Heads(3, 3, 64), 1).item) == 1
    assert len(make_tasks(items, 16, Heads(3, 3, 64), 2).item) > 2


def test_one_row_beside_prompts_is_read_for_all_heads_at_once() -> None:
    step = cases.decode(1, 200)
    for _ in range(8):
        step.sequence(0, 0, 64)
    tasks = make_tasks(step.build()[0], 16, Heads(3, 3, 64), 2)
    assert tasks.num_heads[tasks.num_queries == 1].tolist() == [3]
    assert (tasks.num_heads[tasks.num_queries > 1] == 1).all()


@each_native
@pytest.mark.parametrize("head_dim", [1, 24, 31, 80, 96, 128, 256, MAX_NATIVE_HEAD_DIM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_any_width(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    for step in (cases.branching(8), cases.prefill(30, 40)):
        arguments = cases.make(step, Shape(6, 2, head_dim), dtype)
        result, expected = cases.run(kernels, *arguments)[0], cases.expected(*arguments)[0]
        assert error(result, expected) <= cases.OP.tolerance[dtype]


@each_native
def test_heads_too_wide_are_refused(kernels: Kernels) -> None:
    arguments = cases.make(cases.prefill(0, 3), Shape(1, 1, MAX_NATIVE_HEAD_DIM + 1), torch.float32)
    with pytest.raises(ValueError, match="heads of 513 numbers"):
        cases.run(kernels, *arguments)


@each_native
def test_very_many_heads_to_one_are_computed_or_refused(kernels: Kernels) -> None:
    arguments = cases.make(cases.prefill(0, 3), Shape(MAX_LANES, 1, 8), torch.float32)
    assert error(cases.run(kernels, *arguments)[0], cases.expected(*arguments)[0]) <= cases.OP.tolerance[torch.float32]
    with pytest.raises(ValueError, match="257 query heads to 1 key heads, native kernels take 256 to one"):
        cases.run(kernels, *cases.make(cases.prefill(0, 3), Shape(MAX_LANES + 1, 1, 8), torch.float32))


@each_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_depends_on_its_company_by_rounding_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    query, keys, values, items, masking = cases.make(cases.decode(9, 700), Shape(), dtype)
    together = cases.run(kernels, query, keys, values, items, masking)[0]
    for row in range(9):
        alone = AttentionItems(
            start=items.start[row : row + 1],
            length=items.length[row : row + 1],
            block_offset=np.array([0, 44]),
            blocks=items.blocks[44 * row : 44 * row + 44],
            query_offset=np.array([0, 1]),
            queries=np.array([0]),
            positions=items.positions[row : row + 1],
        )
        result = cases.run(kernels, query[row : row + 1], keys, values, alone, masking)[0]
        assert error(result[0], together[row].double()) <= (1e-6 if dtype == torch.float32 else 8e-3)
