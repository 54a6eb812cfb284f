"""The GPU benchmark, one script: correctness, kernels beside the limits of the device, generation beside the roofline.

Run from the root of a checkout, installed or not: `python tests/benchmarks/gpu.py --out build/gpu`. Nothing is
downloaded. Each part has its share of `--minutes`; what does not fit is left out by name, results are written as they
come to gpu.json and gpu.md. `--smoke` runs everything with tiny sizes on a CPU. Ends with 1 when something is wrong.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(ROOT / "tests/benchmarks"), str(ROOT / "tests/support")]

from checkout import use_checkout  # noqa: E402

use_checkout()

import torch  # noqa: E402
from gpu_checks import check_all  # noqa: E402
from gpu_generation import SMOKE, Roofline, Sizes, free, run_workloads  # noqa: E402
from gpu_kernels import Limits, measure_limits, time_kernels  # noqa: E402
from gpu_results import Budget, Results  # noqa: E402
from random_model import LLAMA_8B, SMALL, random_engine  # noqa: E402

from batchgen.engine import Engine  # noqa: E402
from batchgen.engine.device import resolve_device  # noqa: E402

PARTS = {"checks": 0.24, "kernels": 0.24, "generation": 0.52}  # shares of the time
FORMATS = (("native", "bfloat16"), ("fp8", "fp8"), ("int4", "fp8"))  # weights, KV cache


def generation(results: Results, device: torch.device, limits: Limits, seconds: float, smoke: bool) -> None:
    """The formats one after the other, each with an equal part of the time; then a real model, where there is one."""
    config, sizes = (SMALL, SMOKE) if smoke else (LLAMA_8B, Sizes())
    settings = {"memory": "8MiB"} if smoke else {"memory": 0.95}
    models = sorted((ROOT / "models").glob("*.gguf"))
    shares = len(FORMATS) + len(models) / 4
    made = [
        (
            f"8B {weights}, KV {kv}",
            weights,
            partial(random_engine, config, weights, device, torch.bfloat16, kv_cache=kv),
        )
        for weights, kv in FORMATS
    ]
    for path in [] if smoke else models:
        load = partial(Engine.load, str(path), device=str(device), weights="native", speculation="off")
        made.append((path.stem, "native", load))
    for number, (name, weights, make) in enumerate(made):
        share = seconds / shares * (1 if number < len(FORMATS) else 0.25)
        _one_model(Budget.of(results, "generation", share), name, partial(make, **settings), weights, limits, sizes)
        free(device)


def _one_model(
    budget: Budget, name: str, make: Callable[[], Engine], weights: str, limits: Limits, sizes: Sizes
) -> None:
    """A model that cannot be made is a result too, and the next one has its turn."""
    try:
        engine = make()
    except Exception as error:
        budget.results.add(budget.part, f"{name}: engine", ok=False, error=f"{type(error).__name__}: {error}"[:300])
        return
    run_workloads(budget, name, engine, Roofline(engine, limits, weights), sizes)


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
    seconds = 60 * chosen.minutes
    began = time.perf_counter()
    with torch.inference_mode():
        limits = measure_limits(device, chosen.smoke)
    rates = {
        "bf16 TFLOP/s": limits.bfloat16 / 1e12,
        "fp8 TFLOP/s": limits.fp8 / 1e12,
        "copy GB/s": limits.bandwidth / 1e9,
    }
    results.add("limits", "measured", **rates)
    if "checks" in parts:
        check_all(Budget.of(results, "checks", PARTS["checks"] * seconds), device, chosen.smoke)
    if "kernels" in parts:
        with torch.inference_mode():
            time_kernels(Budget.of(results, "kernels", PARTS["kernels"] * seconds), device, limits, chosen.smoke)
    if "generation" in parts:
        left = seconds - (time.perf_counter() - began)
        generation(results, device, limits, left if not chosen.part else seconds, chosen.smoke)
    print(f"{len(results.records)} records in {time.perf_counter() - began:.0f} s: {chosen.out / 'gpu.md'}")
    for name in results.wrong:
        print(f"WRONG {name}")
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
