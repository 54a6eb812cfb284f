"""Who a process is, so that another one can tell whether it still lives.

Knows hosts, process ids and start times; a reused process id is told apart by the start time.
"""

import os
import socket
from pathlib import Path
from typing import Any

import psutil


def describe(process_id: int | None = None) -> dict[str, Any]:
    """Host, boot, process namespace, id and start time of a process (default: this one)."""
    process_id = process_id or os.getpid()
    return {"host": socket.gethostname(), **_machine(), "pid": process_id, "started": _started(process_id)}


def is_alive(owner: dict[str, Any], heartbeat_age: float, patience: float) -> bool:
    """Whether the described process may still be running.

    On this machine its id and start time decide; elsewhere its heartbeat, which must be younger than `patience`
    seconds. A machine that was booted anew has lost all its processes.
    """
    here = {"host": socket.gethostname(), **_machine()}
    if owner.get("host") == here["host"] and owner.get("boot") != here["boot"]:
        return False
    if all(owner.get(key) == value for key, value in here.items()):
        started = _started(int(owner["pid"]))
        return started is not None and started == owner.get("started")
    return heartbeat_age < patience


def _machine() -> dict[str, str | None]:
    return {"boot": _read("/proc/sys/kernel/random/boot_id"), "namespace": _link("/proc/self/ns/pid")}


def _started(process_id: int) -> float | None:
    """When a process started, in units that only compare; None when it is gone or a zombie."""
    try:
        process = psutil.Process(process_id)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        stat = _read(f"/proc/{process_id}/stat")
        return float(stat.rpartition(")")[2].split()[19]) if stat else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
