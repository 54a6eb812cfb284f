"""Correctness on the device, first: the cases of every op, then tiny models of every family, format and KV type.

Each op is held to its own truth in float64; each model to the same model in float32 on the CPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from gpu_results import Budget
from gpu_workers import LEFT_OUT, Call, outcomes, started
from same_rounding import SameRounding
from torch import Tensor

from batchgen import kernels as op_tables
from batchgen.engine import Engine, Request, Sampling
from batchgen.kernels.case import Case, Op, error
from batchgen.kernels.cases import OPS
from batchgen.kernels.rounding import E4M3

COMPOSED = {"draw"}  # on a device by ops that are checked themselves: cases pack its heads on the host
CHECKED = [(number, op) for number, op in enumerate(OPS) if op.name not in COMPOSED]
DTYPES = (torch.float32, torch.bfloat16)
FORMATS = ("native", "int8", "int4", "fp8")
KV_FORMATS = ("fp8", "int8", "int4")
SUMS_OF_E4M3 = 2e-3  # some 14 bits of the largest of 128 products
BROKEN: list[str] = []  # the case behind which the device gave this process up
PAIRS = 3  # of formats: each weight and each KV cache once
ALIKE = 0.1  # in log-probability, between tables that round activations alike: sums of 8-bit floats keep 14 bits
MOST_RISE = 2.0, 0.05  # times the CPU's own distance from float32, and beside it, in log-probability


def on_device(value: Any, device: torch.device) -> Any:
    """Arguments of an op with their tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(on_device(one, device) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value) if one.init]
        return replace(value, **{name: on_device(getattr(value, name), device) for name in names})
    return value


def check_all(device: torch.device, smoke: bool, folder: Path, pool: Pool) -> Callable[[Budget], None]:
    """Begins with models, then ops, spread over processes; what is returned waits for them and says what came out."""
    cases, models = _cases(device, smoke), _models(folder, device, smoke)
    calls: list[Call] = [(check_model, one) for one in models.values()]
    under_way = started(pool, calls + [(check_case, one) for one in cases])

    def report(budget: Budget) -> None:
        found = outcomes(under_way, budget.left)
        for name, near in zip(models, found, strict=False):
            budget.results.add(budget.part, name, **({"skipped": "no time left"} if near == LEFT_OUT else near))
        for number, op in CHECKED:
            own = {one[1:3]: far for one, far in zip(cases, found[len(models) :], strict=True) if one[0] == number}
            budget.results.add(budget.part, op.name, **_summary(op, own))

    return report


def _cases(device: torch.device, smoke: bool) -> list[tuple[int, int, str, str]]:
    """Op and case by their numbers, dtype and device."""
    return [
        (number, case, str(dtype)[6:], str(device))
        for number, op in CHECKED
        for case in range(len(op.cases[:2] if smoke else op.cases))
        for dtype in DTYPES
        if dtype in op.tolerance
    ]


def check_case(op: int, case: int, dtype: str, device: str) -> float | str:
    """How far the case is off, in units of its tolerance, or what was raised."""
    if BROKEN:
        return f"not looked at: the device takes nothing from this process behind {BROKEN[0]}"
    try:
        with torch.inference_mode():
            kernels, one = op_tables.load(device), OPS[op].cases[case]
            return _off(OPS[op], one, getattr(torch, dtype), kernels, torch.device(device))
    except Exception as problem:  # every case is looked at
        if not _sound(torch.device(device.partition(":")[0] if device.startswith("cuda") else "cpu")):
            BROKEN.append(f"{OPS[op].name} {OPS[op].cases[case].name} {dtype}")
        return f"{type(problem).__name__}: {problem}"[:120]


def _sound(device: torch.device) -> bool:
    """Whether the device still works for this process; behind a bad access it never does again."""
    try:
        torch.empty(1, device=device).fill_(0).item()
    except RuntimeError:
        return False
    return True


def _summary(op: Op, found: dict[tuple[int, str], float | str]) -> dict[str, Any]:
    done = {key: off for key, off in found.items() if off != LEFT_OUT}
    if not done:
        return {"skipped": f"no time left for {len(found)} cases"}
    off = {key: one for key, one in done.items() if isinstance(one, float)}
    failed = [
        f"{op.cases[case].name} {dtype}: {one if isinstance(one, str) else f'{one:.3g} times the tolerance'}"
        for (case, dtype), one in done.items()
        if isinstance(one, str) or one > 1
    ]
    counts = {"cases": len(done), "left_out": len(found) - len(done), "failed_cases": len(failed)}
    return {
        "ok": not failed,
        **counts,
        "worst_of_tolerance": max(off.values(), default=0.0),
        "failed": "; ".join(failed[:3]),
    }


def _off(op: Op, case: Case, dtype: torch.dtype, kernels: Any, device: torch.device) -> float:
    """The error in units of the tolerance; where equality is asked for, any error counts as beyond it."""
    arguments = case.make(dtype)
    results = op.run(kernels, *on_device(arguments, device))
    truth = op.truth(kernels, arguments)
    off = max((error(result.cpu(), one) for result, one in zip(results, truth, strict=True)), default=0.0)
    allowed = allowance(op, dtype, kernels, arguments)
    return off / allowed if allowed else off * 1e9


def allowance(op: Op, dtype: torch.dtype, kernels: Any, arguments: tuple[Any, ...]) -> float:
    """The tolerance of a result; between 8-bit floats what the sums of tensor cores keep, whatever the dtype."""
    rule = None if op.rounding is None else op.rounding(kernels, *arguments)
    return max(op.tolerance[dtype], SUMS_OF_E4M3 if rule is not None and rule.numbers == E4M3 else 0.0)


def _models(folder: Path, device: torch.device, smoke: bool) -> dict[str, tuple[str, str, dict[str, str]]]:
    """By what is checked, the arguments of `check_model`."""
    import tiny

    families = list(tiny.FAMILIES)[:1] if smoke else list(tiny.FAMILIES)
    paths = {family: str(tiny.tiny_model(family, folder / family)) for family in families}
    exact: dict[str, tuple[str, str, dict[str, str]]] = {
        f"{family} float32": (path, str(device), {}) for family, path in paths.items()
    }
    pairs = [(families[0], "int4", "fp8")] if smoke else tiny.CROSSED[:PAIRS]
    chosen = [(families[0], name, one) for name, one in _formats(smoke)]
    chosen += [
        (family, f"weights {weights}, KV {cache}", {"weights": weights, "kv_cache": cache})
        for family, weights, cache in pairs
    ]
    return exact | {f"{family} {name}": (paths[family], str(device), one) for family, name, one in chosen}


def check_model(path: str, device: str, chosen: dict[str, str]) -> dict[str, Any]:
    """In float32 the tokens, in formats that are chosen the log-probabilities, beside those on the CPU."""
    try:
        if "dtype" in chosen:
            return _near(Path(path), torch.device(device), chosen)
        if chosen:
            return _alike(Path(path), device, chosen)
        return _same(_answers(Path(path), "cpu"), _answers(Path(path), device))
    except Exception as problem:  # every model is looked at
        return {"ok": False, "error": f"{type(problem).__name__}: {problem}"[:300]}


def _formats(smoke: bool) -> Iterator[tuple[str, dict[str, str]]]:
    weights, caches = (FORMATS[1:2], KV_FORMATS[:1]) if smoke else (FORMATS, KV_FORMATS)
    yield from ((f"weights {name}", {"weights": name, "dtype": "bfloat16"}) for name in weights)
    yield from ((f"KV {name}", {"kv_cache": name, "dtype": "bfloat16"}) for name in caches)


def _requests() -> list[Request]:
    import tiny

    start = tiny.random_prompt(70, seed=1)
    prompts = [start + tiny.random_prompt(3 + i, seed=10 + i) for i in range(12)]
    prompts += [tiny.random_prompt(1 + 7 * i, seed=40 + i) for i in range(12)]
    greedy, drawn = Sampling(max_tokens=12, temperature=0), Sampling(max_tokens=12, temperature=0.9, top_p=0.9, seed=5)
    return [Request(key, prompt, greedy if key % 2 else drawn) for key, prompt in enumerate(prompts)]


def _engine(path: Path, device: str, **chosen: Any) -> Engine:
    settings = {"dtype": "float32", "memory": "64MiB", "speculation": "off", **chosen}
    return Engine.load(str(path), device=device, **settings)


def _answers(path: Path, device: str) -> dict[int, Any]:
    return {done.key: done.tokens for done in _engine(path, device).run(_requests())}


def _same(expected: dict[int, Any], found: dict[int, Any]) -> dict[str, Any]:
    different = sum(found[key] != answer for key, answer in expected.items())
    return {"ok": different == 0, "rows": len(expected), "rows_that_differ": different}


def _near(path: Path, device: torch.device, chosen: dict[str, str]) -> dict[str, Any]:
    """How far first tokens' log-probabilities are from float32, here and on the CPU in the same format."""
    exact = _first(path, "cpu", {})
    here, there = (_distance(exact, _first(path, place, chosen)) for place in (str(device), "cpu"))
    return {"ok": here <= MOST_RISE[0] * there + MOST_RISE[1], "distance": here, "distance_on_cpu": there}


def _alike(path: Path, device: str, chosen: dict[str, str]) -> dict[str, Any]:
    """How far they are in float32 from plain products of activations that are rounded as the device's are."""
    found, load = _first(path, device, chosen), op_tables.load
    op_tables.load = lambda name: SameRounding(load(device))
    try:
        off = _distance(_first(path, "cpu", chosen), found)
    finally:
        op_tables.load = load
    return {"ok": off <= ALIKE, "distance": off}


def _first(path: Path, device: str, chosen: dict[str, str]) -> dict[int, dict[int, float]]:
    sampling = Sampling(max_tokens=1, temperature=0, logprobs=20)
    requests = [Request(one.key, one.prompt, sampling) for one in _requests()]
    return {done.key: dict(done.logprobs[0].top) for done in _engine(path, device, **chosen).run(requests)}


def _distance(exact: dict[int, dict[int, float]], found: dict[int, dict[int, float]]) -> float:
    """The mean over rows of the largest difference among the tokens that are likely in both."""
    worst = [max(abs(exact[key][t] - found[key][t]) for t in exact[key] if t in found[key]) for key in exact]
    return sum(worst) / len(worst)
