"""What this machine computes with, read from the system without loading torch."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Place:
    """Where steps are computed. `kind`: cpu or cuda; `name`: the model of the processor or of the graphics card."""

    kind: str
    name: str


def has_bfloat16() -> bool:
    """The processor multiplies bfloat16 natively."""
    return re.search(r"\b(avx512_bf16|amx_bf16)\b", _cpuinfo()) is not None


def computed_dtype(asked: str, stored: str | None, device: str) -> str:
    """The number format of computation for a `model.dtype` and the checkpoint's own, on a kind of device."""
    if asked != "auto":
        return asked
    return "bfloat16" if stored != "float32" and (device == "cuda" or has_bfloat16()) else "float32"


def likely_place(name: str) -> Place:
    """What an `engine.device` value comes to, as far as that is seen without torch; a card is taken for the first."""
    kind = name.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if _DRIVER.exists() else "cpu"
    return Place(kind, _first_card() if kind == "cuda" else processor_name())


def _first_card() -> str:
    """The graphics card by the name that its driver gives it."""
    cards = sorted(_DRIVER.parent.glob("gpus/*/information"))
    named = re.search(r"^Model:\s*(.+)$", cards[0].read_text(), re.MULTILINE) if cards else None
    return named[1].strip() if named else "unknown card"


def processor_name() -> str:
    """Model of the processor and how many of it there are."""
    named = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _cpuinfo() -> str:
    return _CPUINFO.read_text() if _CPUINFO.exists() else ""
