"""How much memory keys and values get: what `engine.memory` means on a kind of device, and what this host has free.

Reads the system without loading torch; what a graphics card has free is asked for elsewhere.
"""

from pathlib import Path

import psutil

from .config import parse_memory

AUTO_SHARE = {"cpu": 0.25, "cuda": 0.9}  # of free memory
AUTO_LIMIT = {"cpu": 4 * 2**30, "cuda": 2**50}
CGROUP = Path("/sys/fs/cgroup")


def cache_bytes(memory: str | int | float, kind: str, free: int) -> int:
    """Bytes of KV cache for an `engine.memory` value where `free` bytes are; a size is as it is asked for."""
    size = parse_memory(memory)
    if size is None:
        return min(int(AUTO_SHARE[kind] * free), AUTO_LIMIT[kind])
    return int(size * free) if isinstance(size, float) else size


def free_host_memory() -> int:
    """Bytes that can still be allocated on the host, within the cgroup's limit."""
    free = int(psutil.virtual_memory().available)
    limit, used = cgroup_numbers("memory.max"), cgroup_numbers("memory.current")
    return min(free, max(0, int(limit[0] - used[0]))) if limit and used else free


def cgroup_numbers(name: str) -> list[float]:
    """The numbers of a file of the cgroup; empty when it is absent or says "max"."""
    try:
        return [float(word) for word in (CGROUP / name).read_text().split()]
    except (OSError, ValueError):
        return []
