"""Times every case of every op against the limits of the machine, measured in the same run.

Run by hand: `python tests/benchmarks/kernels.py [--device cpu] [--op attention] [--threads 2]`. A kernel whose result
is wrong is not timed. Reads and writes count as the case states them, so GB/s of cases that fit the cache may exceed
the limit.
"""

import time
from collections.abc import Callable

import click
import torch

from batchgen.kernels import Kernels, load
from batchgen.kernels.case import Case, Op, error
from batchgen.kernels.cases import LARGE, OPS
from batchgen.kernels.tables import TABLES

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


def limits(dtype: torch.dtype) -> tuple[float, float]:
    """GFLOP/s of a large matrix product and GB/s of a large copy."""
    size = 1536
    left, right, out = (torch.randn(size, size).to(dtype) for _ in range(3))
    source = torch.zeros(2**27 // dtype.itemsize, dtype=dtype)
    target = torch.zeros_like(source)
    rate = 2 * size**3 / seconds(lambda: torch.mm(left, right, out=out)) / 1e9
    return rate, 2 * 2**27 / seconds(lambda: target.copy_(source)) / 1e9


def verified(op: Op, case: Case, dtype: torch.dtype, kernels: Kernels) -> Callable[[], object]:
    """The call to time. Raises SystemExit when its result is wrong."""
    arguments = case.make(dtype)
    for result, expected in zip(op.run(kernels, *arguments), op.expected(*arguments), strict=True):
        if (off := error(result, expected)) > op.tolerance[dtype]:
            raise SystemExit(f"{op.name} / {case.name} / {dtype}: wrong by {off:.2e}, not timed")
    return op.prepare(kernels, *arguments) if op.prepare else lambda: op.run(kernels, *arguments)


@click.command()
@click.option("--device", default="cpu", type=click.Choice(list(TABLES)))
@click.option("--op", "names", multiple=True, help="Only this op; repeatable.")
@click.option("--threads", type=int, help="Threads of torch.")
@torch.inference_mode()
def main(device: str, names: tuple[str, ...], threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    kernels = load(device)
    limit = {dtype: limits(dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, (rate, bandwidth) in limit.items():
        click.echo(f"limit {str(dtype)[6:]:9} {rate:7.0f} GFLOP/s {bandwidth:6.1f} GB/s")
    for op in (*OPS, *LARGE):
        for case in op.cases if not names or op.name in names else ():
            for dtype in op.tolerance:
                took = seconds(verified(op, case, dtype, kernels))
                moved = case.elements * dtype.itemsize + case.bytes
                rate, bandwidth = case.operations / took / 1e9, moved / took / 1e9
                click.echo(
                    f"{op.name:9} {case.name:40} {str(dtype)[6:]:9} {took * 1e3:9.3f} ms "
                    f"{rate:6.0f} GFLOP/s ({rate / limit[dtype][0]:4.0%}) "
                    f"{bandwidth:6.1f} GB/s ({bandwidth / limit[dtype][1]:4.0%})"
                )


if __name__ == "__main__":
    main()
