"""What this machine grants: cores, memory, and the number format it computes fast in.

Reads the system; decides nothing about a job.
"""

import os

import psutil
import torch

from .cgroup import granted_quota
from .memory import free_host_memory
from .processor import has_bfloat16
from .spec import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The number format of the computation, for a `model.dtype` and the checkpoint's own.

    auto: float32 when the checkpoint is in float32, else bfloat16, and float32 where the processor has no bfloat16.
    Raises ModelError for a name that is none.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ModelError(f"model.dtype: must be one of {', '.join(['auto', *DTYPES])}, got {name!r}")
        return DTYPES[name]
    if stored == "float32":
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" or has_bfloat16() else torch.float32


def granted_cores() -> int:
    """Cores this process may use: its affinity mask, and the CPU quotas of its cgroups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = min(allowed, psutil.cpu_count(logical=False) or allowed)
    return max(1, int(min(allowed, granted_quota())))


def use_granted_cores() -> None:
    """As many torch threads as cores; more would only take turns."""
    torch.set_num_threads(min(torch.get_num_threads(), granted_cores()))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, within the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory()
