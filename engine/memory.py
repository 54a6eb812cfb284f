"""How much memory keys and values get: what `engine.memory` means on a kind of device, and what this host has free.

Reads the system without loading torch; what a graphics card has free is asked for elsewhere.
"""

import psutil

from .cgroup import memory_left
from .config import parse_memory

AUTO_SHARE = {"cpu": 0.25, "cuda": 0.9}  # of free memory
AUTO_LIMIT = {"cpu": 4 * 2**30, "cuda": 2**50}


def cache_bytes(memory: str | int | float, kind: str, free: int) -> int:
    """Bytes of KV cache for an `engine.memory` value where `free` bytes are; a size is as it is asked for."""
    size = parse_memory(memory)
    if size is None:
        return min(int(AUTO_SHARE[kind] * free), AUTO_LIMIT[kind])
    return int(size * free) if isinstance(size, float) else size


def free_host_memory() -> int:
    """Bytes that can still be allocated on the host, within the limits of its cgroups."""
    return int(min(psutil.virtual_memory().available, memory_left()))
