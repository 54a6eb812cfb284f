"""The GPU benchmark, one script: correctness, kernels beside the limits of the device, generation beside the roofline.

Run from the root of a checkout, installed or not: `python tests/benchmarks/gpu.py --out build/gpu`. Nothing is
downloaded. Each part has its share of `--minutes`; what does not fit is left out by name, results are written as they
come to gpu.json and gpu.md. `--smoke` runs everything with tiny sizes on a CPU. Ends with 1 when something is wrong.
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(ROOT / "tests/benchmarks"), str(ROOT / "tests/support")]

from checkout import use_checkout  # noqa: E402

use_checkout()

import torch  # noqa: E402
from gpu_ahead import calls as calls_ahead  # noqa: E402
from gpu_checks import check_all  # noqa: E402
from gpu_generation import FORMATS, SMOKE, Roofline, Sizes, free, run_workloads  # noqa: E402
from gpu_kernels import Limits, measure_limits, time_kernels  # noqa: E402
from gpu_results import Budget, Results  # noqa: E402
from gpu_workers import LEFT_OUT, Apart, Relay, outcomes, started, workers  # noqa: E402
from random_model import LLAMA_8B, SMALL, random_engine  # noqa: E402

from batchgen.engine import Engine  # noqa: E402
from batchgen.engine.device import resolve_device  # noqa: E402

PARTS = {"checks": 0.34, "kernels": 0.18, "generation": 0.48}  # shares of the time; kernels are compiled in the first
CHECKED = 0.75  # of that one: what is not checked by then is left out
LATE = 15.0  # seconds that a measurement may take beyond its time before its process is ended


def ahead(results: Results, device: torch.device, parts: list[str], seconds: float, smoke: bool) -> None:
    """Checks, then the kernels of the other parts compiled, in processes that are gone before anything is timed."""
    end = time.perf_counter() + seconds
    with tempfile.TemporaryDirectory() as folder, workers(device) as pool:
        report = check_all(device, smoke, Path(folder), pool) if "checks" in parts else None
        under_way = {part: started(pool, calls) for part, calls in calls_ahead(device, parts).items()}
        if report is not None:
            report(Budget.of(results, "checks", CHECKED * seconds))
        for part, calls in under_way.items():
            found = outcomes(calls, lambda: end - time.perf_counter())
            faults = [one for one in found if one not in ("", LEFT_OUT)]
            counts = {"calls": len(calls), "left_out": found.count(LEFT_OUT), "faults": len(faults)}
            results.add(part, "compiled ahead", **counts, first_fault=(*faults, "")[0])


def kernels(results: Relay, end: float, device: torch.device, limits: Limits, smoke: bool) -> None:
    with torch.inference_mode():
        time_kernels(Budget(results, "kernels", end), device, limits, smoke)


def one_model(results: Relay, end: float, device: torch.device, limits: Limits, smoke: bool, number: int) -> None:
    """A model that cannot be made is a result too."""
    name, weights, make = models(device, smoke)[number]
    budget = Budget(results, "generation", end)
    try:
        engine = make()
    except Exception as error:
        results.add(budget.part, f"{name}: engine", ok=False, error=f"{type(error).__name__}: {error}"[:300])
        return
    run_workloads(budget, name, engine, Roofline(engine, limits, weights), SMOKE if smoke else Sizes())


def models(device: torch.device, smoke: bool) -> list[tuple[str, str, Callable[[], Engine]]]:
    """Name, weights and what makes it: random ones in every format, then real ones, where there are some."""
    settings = {"memory": "8MiB"} if smoke else {"memory": 0.95}
    config = SMALL if smoke else LLAMA_8B
    made = [
        (name, weights, partial(random_engine, config, weights, device, torch.bfloat16, kv_cache=cache, **settings))
        for name, weights, cache in FORMATS
    ]
    for path in [] if smoke else sorted((ROOT / "models").glob("*.gguf")):
        options = {"device": str(device), "weights": "native", "speculation": "off", **settings}
        made.append((path.stem, "native", partial(Engine.load, str(path), **options)))
    return made


def describe(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    found = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        import triton

        found["triton"] = triton.__version__
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="folder of gpu.json and gpu.md")
    options.add_argument("--minutes", type=float, default=7.5, help="for all of it")
    options.add_argument("--part", choices=PARTS, action="append", help="only this one; repeatable")
    options.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    options.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU")
    chosen = options.parse_args()
    device = resolve_device("cpu" if chosen.smoke else chosen.device)
    results, parts = Results(chosen.out, describe(device)), chosen.part or list(PARTS)
    began, seconds = time.perf_counter(), 60 * chosen.minutes
    shares = {part: seconds * share for part, share in PARTS.items()}
    names = [name for name, _, _ in models(device, chosen.smoke)]
    apart = [Apart(device) for _ in range(("kernels" in parts) + len(names) * ("generation" in parts))]
    with torch.inference_mode():
        limits = measure_limits(device, chosen.smoke)
    free(device)
    rates = {
        "bf16 TFLOP/s": limits.bfloat16 / 1e12,
        "fp8 TFLOP/s": limits.fp8 / 1e12,
        "copy GB/s": limits.bandwidth / 1e9,
    }
    results.add("limits", "measured", **rates)
    ahead(results, device, parts, shares["checks"], chosen.smoke)
    given = device, limits, chosen.smoke
    if "kernels" in parts:
        end = time.perf_counter() + shares["kernels"]
        apart.pop(0).run(results, ("kernels", "kernels"), shares["kernels"] + LATE, (kernels, (end, *given)))
    for number, process in enumerate(apart):
        left = (began + seconds - time.perf_counter()) / (len(apart) - number)
        call = one_model, (time.perf_counter() + left, *given, number)
        process.run(results, ("generation", names[number]), left + LATE, call)
    print(f"{len(results.records)} records in {time.perf_counter() - began:.0f} s: {chosen.out / 'gpu.md'}")
    for name in results.wrong:
        print(f"WRONG {name}")
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
