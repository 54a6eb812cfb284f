"""Times every case of every op on several backends against the limits of the machine, measured in the same run.

Run by hand: `python tests/benchmarks/kernels.py [--backend native-avx2] [--op attention] [--case "decode 64"]
[--dtype bfloat16] [--steps] [--threads 2]`. A kernel whose result is wrong is not timed. Reads and writes count as the
case states them, beside what the machine reads from memory: cases that fit the cache may exceed it.
"""

import time
from collections.abc import Callable
from itertools import product

import click
import torch

from batchgen.kernels import Kernels
from batchgen.kernels.case import Case, Op, error
from batchgen.kernels.cases import LARGE, OPS
from batchgen.kernels.native.library import available
from batchgen.kernels.tables import NativeKernels, ReferenceKernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIN_SECONDS = 0.3
MIN_CALLS = 3


def seconds(call: Callable[[], object]) -> float:
    """The fastest of several calls."""
    call()
    best, calls, end = float("inf"), 0, time.perf_counter() + MIN_SECONDS
    while calls < MIN_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best


def backends() -> dict[str, Kernels]:
    """The reference, and the native kernels for every instruction set of this processor, best first."""
    return {"reference": ReferenceKernels(), **{f"native-{name}": NativeKernels(name) for name in available()}}


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """GFLOP/s of a large matrix product; GB/s of reading memory on all threads.

    The memory is written first: what was never written is one page of zeros that lies in the cache.
    """
    size = 1536
    left, right, out = (torch.randn(size, size).to(dtype) for _ in range(3))
    source = torch.ones(2**26)
    rate = 2 * size**3 / seconds(lambda: torch.mm(left, right, out=out)) / 1e9
    return rate, source.nbytes / seconds(source.sum) / 1e9


def verified(op: Op, case: Case, dtype: torch.dtype, kernels: Kernels) -> Callable[[], object]:
    """The call to time. Raises SystemExit when its result is wrong."""
    arguments = case.make(dtype)
    for result, expected in zip(op.run(kernels, *arguments), op.truth(kernels, arguments), strict=True):
        if (off := error(result, expected)) > op.tolerance[dtype]:
            raise SystemExit(f"{op.name} / {case.name} / {dtype}: wrong by {off:.2e}, not timed")
    return op.prepare(kernels, *arguments) if op.prepare else lambda: op.run(kernels, *arguments)


def report(op: Op, case: Case, dtype: torch.dtype, kernels: Kernels, limit: tuple[float, float]) -> str:
    took = seconds(verified(op, case, dtype, kernels))
    moved = case.elements * dtype.itemsize + case.bytes
    rate, bandwidth = case.operations / took / 1e9, moved / took / 1e9
    return (
        f"{took * 1e3:9.3f} ms {rate:6.0f} GFLOP/s ({rate / limit[0]:4.0%}) "
        f"{bandwidth:6.1f} GB/s ({bandwidth / limit[1]:4.0%})"
    )


@click.command()
@click.option("--backend", "chosen", multiple=True, type=click.Choice(list(backends())), help="Repeatable.")
@click.option("--op", "names", multiple=True, help="Only this op; repeatable.")
@click.option("--case", "part", default="", help="Only cases with this in their name.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Only this one.")
@click.option("--steps", is_flag=True, help="Only the sizes of real steps.")
@click.option("--threads", type=int, help="Threads of torch.")
@torch.inference_mode()
def main(
    chosen: tuple[str, ...], names: tuple[str, ...], part: str, dtype: str | None, steps: bool, threads: int | None
) -> None:
    if threads:
        torch.set_num_threads(threads)
    tables = {name: kernels for name, kernels in backends().items() if name in (chosen or list(backends())[:2])}
    limit = {kind: limits(kind) for kind in ([DTYPES[dtype]] if dtype else DTYPES.values())}
    for kind, (rate, bandwidth) in limit.items():
        click.echo(f"limit {str(kind)[6:]:9} {rate:7.0f} GFLOP/s {bandwidth:6.1f} GB/s read")
    ops = [op for op in (LARGE if steps else (*OPS, *LARGE)) if not names or op.name in names]
    for op, case in ((owner, case) for owner in ops for case in owner.cases if part in case.name):
        for kind, (name, kernels) in product([kind for kind in limit if kind in op.tolerance], tables.items()):
            line = report(op, case, kind, kernels, limit[kind])
            click.echo(f"{op.name:11} {case.name:43} {str(kind)[6:]:9} {name:15} {line}")


if __name__ == "__main__":
    main()
