"""Linear layers of SmolLM2 in 8 and 4 bits beside torch's bfloat16 and int8 products, in one run, as a Markdown table.

Run by hand: `python tests/benchmarks/linears.py [--threads 2]`. The quantised figures include rounding the activations
and scaling the result; torch's `_int_mm` has neither. In brackets, for one row: GB/s of weights read, from memory, as
several weights that together exceed the caches take turns.
"""

import time
from collections.abc import Callable
from itertools import cycle

import click
import torch
from torch.nn import functional

from batchgen.kernels import Kernels, load
from batchgen.kernels.case import error, normal
from batchgen.kernels.linear_int4.cases import make_weight as int4
from batchgen.kernels.linear_int8.cases import make_weight as int8
from batchgen.kernels.panels.cases import HEAD, SMOLLM2, Form, expected

SHAPES = {**SMOLLM2, "head": HEAD}
ROWS = (1, 16, 64, 256, 2048)
MOST_NUMBERS = 1 << 24  # of a result
BEYOND_CACHES = 1 << 27  # bytes
FORMS = {
    "W8A8 per output": (int8, Form(half=False, minimum=False)),
    "W8A8 groups of 32": (int8, Form(32, minimum=False)),
    "W4A8 groups of 32": (int4, Form(32)),
    "W4A8 groups of 64": (int4, Form(64)),
}


def seconds(call: Callable[[], object], least: float) -> float:
    """The fastest of several calls."""
    call()
    best, end = float("inf"), time.perf_counter() + least
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def quantised(kernels: Kernels, name: str, x: torch.Tensor, outputs: int) -> tuple[Callable[[], torch.Tensor], int]:
    """The call to time and the bytes of its weight. Raises SystemExit when its result is wrong."""
    make, form = FORMS[name]
    weight = make(outputs, x.shape[1], form)
    pack, op = (kernels.pack_int8, kernels.linear_int8) if make is int8 else (kernels.pack_int4, kernels.linear_int4)
    packed = pack(weight)
    some = x[:16]
    if error(op(some, packed, None, torch.float32), *expected(some, weight, None, kernels.rounding(weight))) > 1e-4:
        raise SystemExit(f"{name}: wrong, not timed")
    size = sum(part.nbytes for part in (weight.q, weight.scale, weight.minimum) if part is not None)
    copies = cycle([packed, *(pack(weight) for _ in range(BEYOND_CACHES // size if len(x) == 1 else 0))])
    return lambda: op(x, next(copies), None, torch.bfloat16), size


def line(kernels: Kernels, part: str, rows: int, least: float) -> str:
    inputs, outputs = SHAPES[part]
    x, giga = normal((rows, inputs), torch.bfloat16, 1), 2 * rows * inputs * outputs / 1e9
    dense = normal((outputs, inputs), torch.bfloat16, 2)
    whole, weight = x.mul(20).to(torch.int8), dense.mul(20).to(torch.int8).t()
    cells = [
        f"{giga / seconds(lambda: functional.linear(x, dense), least):.0f}",
        f"{giga / seconds(lambda: torch._int_mm(whole, weight), least):.0f}",
    ]
    for name in FORMS:
        call, size = quantised(kernels, name, x, outputs)
        took = seconds(call, least)
        cells.append(f"{giga / took:.0f}" + (f" ({size / took / 1e9:.0f})" if rows == 1 else ""))
    return f"| {part} {inputs}x{outputs} | {rows} | {' | '.join(cells)} |"


@click.command()
@click.option("--threads", type=int, help="Threads of torch.")
@click.option("--seconds", "least", default=0.2, help="Time for each cell.")
@torch.inference_mode()
def main(threads: int | None, least: float) -> None:
    if threads:
        torch.set_num_threads(threads)
    source = torch.ones(2**28, dtype=torch.uint8)
    read = 2**28 / seconds(lambda: source.view(torch.int64).sum(), least) / 1e9
    click.echo(f"{torch.get_num_threads()} threads; memory read at {read:.0f} GB/s; GOP/s:\n")
    click.echo(f"| linear | rows | torch bf16 | torch _int_mm | {' | '.join(FORMS)} |")
    click.echo("|---" * (4 + len(FORMS)) + "|")
    for part, (_, outputs) in SHAPES.items():
        for rows in ROWS:
            if rows * outputs <= MOST_NUMBERS:
                click.echo(line(load("cpu"), part, rows, least))


if __name__ == "__main__":
    main()
