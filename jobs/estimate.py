"""How fast this machine's processor multiplies, measured once and kept; and seconds in words.

Knows one number of the machine; nothing of models or jobs.
"""

import json
import math
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from .files import write_json


def rates_file() -> Path:
    """Where this user's measured rates are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "batchgen" / "rates.json"


def machine_rate(path: Path) -> float:
    """Multiplications and additions per second of a float32 matrix product: the best of all measurements so far.

    Other programs only make it slower.
    """
    machine = (
        f"{platform.node()} {platform.processor() or platform.machine()} {os.cpu_count()} cores numpy {np.__version__}"
    )
    known = _known_rates(path)
    found = measure_operations_per_second()
    if found > known.get(machine, 0.0):
        known[machine] = found
        with suppress(OSError):  # a home that cannot be written costs what an earlier run knew better
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, known)
    return known[machine]


def _known_rates(path: Path) -> dict[str, float]:
    """All that is kept; nothing where the file cannot be read or holds something else."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        kept = json.loads(path.read_text(encoding="utf-8")).items()
        return {machine: rate for machine, rate in kept if isinstance(rate, int | float) and 0 < rate < math.inf}
    return {}


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
