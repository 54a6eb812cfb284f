"""What the control groups of this process grant it: cores and memory, the tightest group on the way to the root.

Reads both versions of the file system; what the machine itself has is not known here.
"""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def granted_quota() -> float:
    """Cores by the CPU quotas, a fraction may be left; infinite where there is none."""
    return min(map(_quota, _groups("cpu")), default=math.inf)


def memory_left() -> float:
    """Bytes until a limit is reached, file pages that can go at once not counted; infinite where there is no limit."""
    return min(map(_left, _groups("memory")), default=math.inf)


def _groups(controller: str) -> Iterator[Path]:
    """Directories of the process's own groups and of all above them; in a container some are not to be seen."""
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = ROOT / controller if controllers else ROOT  # version 1 has a tree for each controller
            names = [name for name in PurePosixPath(path).parts if name not in ("/", "..")]
            yield from (root.joinpath(*names[:depth]) for depth in range(len(names) + 1))


def _quota(group: Path) -> float:
    numbers = _numbers(group / "cpu.max")
    if not numbers:
        numbers = [*_numbers(group / "cpu.cfs_quota_us"), *_numbers(group / "cpu.cfs_period_us")]
    return numbers[0] / numbers[1] if len(numbers) == 2 and min(numbers) > 0 else math.inf


def _left(group: Path) -> float:
    limit = _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
    used = _numbers(group / "memory.current") or _numbers(group / "memory.usage_in_bytes")
    return max(0.0, limit[0] - used[0] + _idle_file_pages(group)) if limit and used else math.inf


def _idle_file_pages(group: Path) -> float:
    """Bytes; version 1 has those of the groups below under a name of their own."""
    found = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return float(found.get("total_inactive_file", found.get("inactive_file", 0)))


def _numbers(path: Path) -> list[float]:
    """The numbers of a file; none where it is absent or says "max"."""
    try:
        return [float(word) for word in _text(path).split()]
    except ValueError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
