"""Runs the cases of the Triton kernels in Triton's interpreter, in a process of its own, and prints what came out.

Run as a program with TRITON_INTERPRET=1 (which Triton reads as it is imported, so no other test may see it): a line of
JSON for every op, case and dtype. `outcomes()` runs it once and gives the lines to tests, which judge them. bfloat16 is
left out: the interpreter multiplies and rounds it wrongly.
"""

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

DTYPES = ("float32", "float16")
MOST_ELEMENTS = 400_000  # of a case: the interpreter takes milliseconds for every program
EDGES = (1, 17, 33, 65)
MOST_OPERATIONS = 40_000_000
CHIPS = {"9.0": (9, 0), "8.0": (8, 0)}
ON_OLD_CHIPS = {"linear_int4", "linear_fp8"}  # ops that go other ways where there are no 8-bit floats
# Ops whose paths the cases in `GPU` walk: of the others those that cost little.
FEW_OPERATIONS = {"attention": 260_000, "rotate_write": 13_000}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a case was off, in units of its tolerance; `error` is the last line of an exception."""

    op: str
    case: str
    dtype: str
    chip: str
    off: float
    error: str = ""


@cache
def outcomes() -> dict[tuple[str, str, str, str], Outcome]:
    """By op, case, dtype and chip."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(f"the interpreter run failed:\n{done.stderr[-3000:]}")
    found = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    return {(one.op, one.case, one.dtype, one.chip): one for one in found}


def small(op: object, case: object) -> bool:
    """Whether the interpreter can be asked to run a case; of the batches that differ by a row, those at an edge."""
    rows = re.fullmatch(r"(\d+) rows", case.name)  # type: ignore[attr-defined]
    if rows and int(rows[1]) not in EDGES:
        return False
    most = FEW_OPERATIONS.get(op.name, MOST_OPERATIONS)  # type: ignore[attr-defined]
    return case.elements <= MOST_ELEMENTS and case.operations <= most  # type: ignore[attr-defined]


def plan() -> list[tuple[str, str, str, str]]:
    """(op, case, dtype, chip) of all that is run: the ops that the table has kernels of its own for."""
    from batchgen.kernels.cases import GPU, OPS
    from batchgen.kernels.gpu_table import GpuKernels

    return [
        (op.name, case.name, dtype, chip)
        for op in (*OPS, *GPU)
        for case in op.cases
        for dtype in DTYPES
        if op.name in vars(GpuKernels) and (op in GPU or small(op, case)) and _wanted(op, dtype)
        for chip in (CHIPS if op.name in ON_OLD_CHIPS else list(CHIPS)[:1])
    ]


def _wanted(op: object, dtype: str) -> bool:
    """Ops with one dtype alone (logits), and those compared bit by bit, are run in float32; the others in both."""
    tolerance = op.tolerance  # type: ignore[attr-defined]
    return dtype == "float32" or (len(tolerance) > 1 and all(tolerance.values()))


def _run() -> Iterator[Outcome]:
    import torch
    from interpreted_checks import CHECKS

    from batchgen.kernels.cases import GPU, OPS
    from batchgen.kernels.chip import Chip
    from batchgen.kernels.gpu_table import GpuKernels

    tables = {name: GpuKernels(Chip(capability, library=False)) for name, capability in CHIPS.items()}
    cases = {(op.name, case.name): (op, case) for op in (*OPS, *GPU) for case in op.cases}
    for op, case, dtype, chip in plan():
        off, problem = _outcome(tables[chip], *cases[op, case], getattr(torch, dtype))
        yield Outcome(op, case, dtype, chip, off, problem)
    for check in CHECKS:
        yield Outcome("check", check.__name__, "", "", 0.0, _problem(partial(check, tables["9.0"])))


def _problem(call: Callable[[], object]) -> str:
    """What was raised, if anything, and where."""
    try:
        call()
    except Exception:
        return traceback.format_exc()[-1500:]
    return ""


def _outcome(kernels: object, op: object, case: object, dtype: object) -> tuple[float, str]:
    """The largest error over the results in units of the tolerance, and what was raised, if anything."""
    from batchgen.kernels.case import error

    try:
        arguments = case.make(dtype)  # type: ignore[attr-defined]
        results = op.run(kernels, *arguments)  # type: ignore[attr-defined]
        expected = op.truth(kernels, arguments)  # type: ignore[attr-defined]
    except Exception as problem:  # every case is reported
        return float("inf"), f"{type(problem).__name__}: {problem}"[-500:]
    allowed = tolerance(op, dtype)
    worst = max(error(result, truth) for result, truth in zip(results, expected, strict=True))
    return (worst / allowed if allowed else worst), ""


def tolerance(op: object, dtype: object) -> float:
    """Of the dtype; float16 has three bits more than bfloat16, of which two are asked for."""
    import torch

    known: dict[object, float] = op.tolerance  # type: ignore[attr-defined]
    return known[torch.bfloat16] / 4 if dtype == torch.float16 else known[torch.float32]


if __name__ == "__main__":
    for outcome in _run():
        print(json.dumps(asdict(outcome)))
