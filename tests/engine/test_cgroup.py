"""Cores and memory by control groups: both versions, nested groups, containers that see a part of the tree."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from batchgen.engine import cgroup, machine, memory

Grant = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grant:
    """Puts the process into groups, with files below the root of the tree."""

    def put(membership: str, files: Mapping[str, str]) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_text(content)

    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    return put


V1 = "4:memory:/slice/job\n3:cpu,cpuacct:/slice/job\n0::/\n"
QUOTAS: dict[str, tuple[str, dict[str, str], float]] = {
    "none": ("0::/a/b\n", {"a/cpu.max": "max 100000\n"}, math.inf),
    "the root of a container": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    "the own group": ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2),
    "a group above": ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 1),
    "a path that is not to be seen": ("0::/../x:y/b\n", {"cpu.max": "300000 100000\n"}, 3),
    "version 1": (V1, {"cpu/slice/cpu.cfs_quota_us": "250000\n", "cpu/slice/cpu.cfs_period_us": "100000\n"}, 2.5),
    "version 1 without": (
        V1,
        {"cpu/slice/cpu.cfs_quota_us": "-1\n", "cpu/slice/cpu.cfs_period_us": "100000\n"},
        math.inf,
    ),
    "no files": ("", {}, math.inf),
}


@pytest.mark.parametrize(("membership", "files", "cores"), QUOTAS.values(), ids=QUOTAS)
def test_the_tightest_quota_counts(grant: Grant, membership: str, files: dict[str, str], cores: float) -> None:
    grant(membership, files)
    assert cgroup.granted_quota() == cores
    assert machine.granted_cores() <= max(1, cores)


LEFT: dict[str, tuple[str, dict[str, str], float]] = {
    "none": ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "5\n"}, math.inf),
    "the own group": ("0::/a/b\n", {"a/b/memory.max": "900\n", "a/b/memory.current": "200\n"}, 700),
    "a group above": (
        "0::/a/b\n",
        {"a/memory.max": "800", "a/memory.current": "300", "a/b/memory.max": "900", "a/b/memory.current": "200"},
        500,
    ),
    "file pages": (
        "0::/a\n",
        {"a/memory.max": "900\n", "a/memory.current": "800\n", "a/memory.stat": "anon 300\ninactive_file 450\n"},
        550,
    ),
    "beyond the limit": ("0::/\n", {"memory.max": "900\n", "memory.current": "1000\n"}, 0),
    "version 1": (
        V1,
        {
            "memory/slice/job/memory.limit_in_bytes": "700\n",
            "memory/slice/job/memory.usage_in_bytes": "600\n",
            "memory/slice/job/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
        },
        150,
    ),
}


@pytest.mark.parametrize(("membership", "files", "left"), LEFT.values(), ids=LEFT)
def test_the_tightest_limit_of_memory_counts(grant: Grant, membership: str, files: dict[str, str], left: float) -> None:
    grant(membership, files)
    assert cgroup.memory_left() == left
    assert memory.free_host_memory() <= left


def test_this_process_is_granted_something() -> None:
    assert cgroup.granted_quota() > 0
    assert cgroup.memory_left() > 0
