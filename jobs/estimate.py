"""How long a job will take on this machine's processor: operations to do, and a measured rate that is kept.

Knows sizes of models and one number of the machine; reads no input.
"""

import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchgen.engine.spec import ModelSpec

from .files import write_json

_ATTAINED = 0.5  # of the rate of a matrix product, over a whole job


@dataclass(frozen=True)
class Estimate:
    """Seconds of a job, and what they rest on."""

    seconds: float
    operations: float
    operations_per_second: float

    @property
    def basis(self) -> str:
        return (
            f"{self.operations:.2g} operations with every answer as long as max_tokens, an upper bound, at half of the "
            f"{self.operations_per_second / 1e9:.0f} GFLOP/s that a float32 matrix product reaches on this processor; "
            "a GPU is many times faster"
        )


def estimate(spec: ModelSpec, prompt_tokens: int, answer_tokens: int, rates: Path | None = None) -> Estimate:
    """For prompt tokens to compute and answer tokens at most. `rates`: the file that keeps this machine's rate."""
    operations = 2.0 * parameters(spec) * (prompt_tokens + answer_tokens)
    rate = machine_rate(rates or rates_file())
    return Estimate(operations / (_ATTAINED * rate), operations, rate)


def parameters(spec: ModelSpec) -> int:
    """Weights that take part in computing one token."""
    layer = spec.hidden_size * (2 * spec.query_size + 2 * spec.key_size + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def rates_file() -> Path:
    """Where this user's measured rates are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "batchgen" / "rates.json"


def machine_rate(path: Path) -> float:
    """Multiplications and additions per second of a float32 matrix product: measured once per machine, then kept."""
    machine = (
        f"{platform.node()} {platform.processor() or platform.machine()} {os.cpu_count()} cores numpy {np.__version__}"
    )
    known: dict[str, float] = {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text(encoding="utf-8"))
    if machine not in known:
        known[machine] = measure_operations_per_second()
        with suppress(OSError):  # a home that cannot be written costs a measurement next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
    return known[machine]


def measure_operations_per_second(size: int = 768, repeats: int = 3) -> float:
    """The best of a few products of `size` x `size` matrices."""
    left = np.ones((size, size), np.float32)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def duration(seconds: float) -> str:
    """`90 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 7200 else f"about {seconds / 3600:.1f} h"
