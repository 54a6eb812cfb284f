"""Runs tiny models through the Triton kernels in Triton's interpreter, one step ahead and with recorded steps.

Run as a program with TRITON_INTERPRET=1, in a process of its own as interpreted.py is: a line of JSON for every model
and op table, with answers and log-probabilities. `answers()` runs it once; tests judge them. Tensors are the CPU's.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

NATIVE = ("native", "auto")
CACHES = (("native", "fp8"), ("native", "int8"), ("native", "int4"))
PLAIN, TRITON = "reference", "triton"


@dataclass(frozen=True, slots=True)
class Answers:
    """What a model of a family said under an op table; `recorded` counts the steps that were replayed."""

    family: str
    weights: str
    kv_cache: str
    table: str
    tokens: list[list[int]]
    logprobs: list[list[float]]
    recorded: int


@cache
def answers() -> dict[tuple[str, str, str, str], Answers]:
    """By family, weights, KV cache and table."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(f"the interpreter run failed:\n{done.stderr[-3000:]}")
    found = [Answers(**json.loads(line)) for line in done.stdout.splitlines()]
    return {(one.family, one.weights, one.kv_cache, one.table): one for one in found}


def plan() -> list[tuple[str, str, str]]:
    """(family, weights, KV cache): every family in float32, one with every KV cache, every pair of formats."""
    import tiny

    families = list(tiny.FAMILIES)
    return [(family, *NATIVE) for family in families] + [("llama3", *one) for one in CACHES] + list(tiny.CROSSED)


def _run() -> Iterator[Answers]:
    import tiny

    with tempfile.TemporaryDirectory() as folder:
        for family, weights, kv_cache in plan():
            path = Path(folder) / family
            if not path.exists():
                tiny.tiny_model(family, path)
            for table in (PLAIN, TRITON):
                yield _answer(path, family, weights, kv_cache, table)


def _answer(path: Path, family: str, weights: str, kv_cache: str, table: str) -> Answers:
    import tiny
    import torch
    from recorded import CallingRecorder
    from same_rounding import SameRounding

    from batchgen import kernels
    from batchgen.engine import Engine, kv
    from batchgen.engine import engine as engine_module
    from batchgen.engine.graphs import EAGER, Recorded, Recurrence
    from batchgen.kernels.chip import Chip
    from batchgen.kernels.gpu_table import GpuKernels

    recorder, executor = CallingRecorder(), EAGER
    if table == TRITON:
        executor = Recorded(recorder)
        executor._recurrence = Recurrence(after=1)
    engine_module.LOOK_AHEAD["cpu"] = int(table == TRITON)
    engine_module.EXECUTORS["cpu"] = lambda: executor
    made = GpuKernels(Chip(library=False))
    kernels.load = lambda device: made if table == TRITON else SameRounding(made)  # type: ignore[assignment]
    kv._zeros = lambda sizes, dtype, device: torch.zeros(sizes, dtype=dtype)  # pages as they lie on a device
    settings = {"memory": "1MiB", "speculation": "off", "kv_cache": kv_cache, "block_size": 8}
    engine = Engine.load(str(path), device="cpu", dtype="float32", weights=weights, **settings)
    crossed = (family, weights, kv_cache) in tiny.CROSSED
    done = sorted(engine.run(_requests()[1::2] if crossed else _requests()), key=lambda completion: completion.key)
    assert all(completion.error is None for completion in done), [completion.error for completion in done]
    tokens = [completion.tokens for completion in done]
    logprobs = [[entry.logprob for entry in completion.logprobs] for completion in done]
    return Answers(family, weights, kv_cache, table, tokens, logprobs, recorder.replayed)


def _requests() -> list[object]:
    """Two that share a start, a long one, one of a single token; greedy and drawn."""
    import tiny

    from batchgen.engine import Request, Sampling

    start = tiny.random_prompt(17, seed=1)
    prompts = [[*start, 9, 8], [*start, 7], tiny.random_prompt(27, seed=2), [11]]
    greedy = Sampling(max_tokens=3, temperature=0, logprobs=0, ignore_eos=True)
    drawn = Sampling(max_tokens=3, temperature=0.9, top_p=0.9, seed=3, logprobs=0, ignore_eos=True)
    return [Request(key, prompt, greedy if key % 2 else drawn) for key, prompt in enumerate(prompts)]


if __name__ == "__main__":
    for one in _run():
        print(json.dumps(asdict(one)))
