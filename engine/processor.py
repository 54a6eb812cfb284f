"""What the processor can do, read from the system without loading torch."""

import os
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def has_bfloat16() -> bool:
    """The processor multiplies bfloat16 natively."""
    return re.search(r"\b(avx512_bf16|amx_bf16)\b", _cpuinfo()) is not None


def computed_dtype(asked: str, stored: str | None) -> str:
    """The number format of computation for a `model.dtype` and the checkpoint's own, on a processor."""
    if asked != "auto":
        return asked
    return "float32" if stored == "float32" or not has_bfloat16() else "bfloat16"


def processor_name() -> str:
    """Model of the processor and how many of it there are."""
    named = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _cpuinfo() -> str:
    return _CPUINFO.read_text() if _CPUINFO.exists() else ""
