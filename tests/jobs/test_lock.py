"""The lock of an output: one live holder, dead ones taken over, never two takers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from batchgen.jobs import lock as lock_module
from batchgen.jobs.errors import JobError, OutputBusyError
from batchgen.jobs.lock import Lock, is_held, read_holder
from batchgen.jobs.owner import describe

HOLD = """
import sys, time
from pathlib import Path
from batchgen.jobs.lock import Lock
Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""

RACE = """
import sys, time
from pathlib import Path
from batchgen.jobs.errors import OutputBusyError
from batchgen.jobs.lock import Lock
print("ready", flush=True)
sys.stdin.readline()
try:
    Lock(Path(sys.argv[1]))
    print("won", flush=True)
    sys.stdin.readline()
except OutputBusyError:
    print("busy", flush=True)
"""


def child(code: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_record(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**describe(), "token": "t", "heartbeat": time.time(), **changes}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock.json"


def test_record_and_release(path: Path) -> None:
    with Lock(path):
        holder = read_holder(path)
        assert holder is not None
        assert holder["pid"] == os.getpid()
        assert is_held(holder)
        with pytest.raises(OutputBusyError, match=f"process {os.getpid()}"):
            Lock(path)
    assert not path.exists()
    Lock(path).release()


def test_live_process_then_killed(path: Path) -> None:
    process = child(HOLD, path)
    assert line(process) == "held"
    with pytest.raises(OutputBusyError) as caught:
        Lock(path)
    assert caught.value.exit_code == 75
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Lock(path):
        assert (read_holder(path) or {})["pid"] == os.getpid()


def test_zombie_owner_is_dead(path: Path) -> None:
    process = child(HOLD, path)
    assert line(process) == "held"
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped
    Lock(path).release()
    process.wait()


def test_reused_process_id_does_not_fool_it(path: Path) -> None:
    write_record(path, started=-1.0)
    Lock(path).release()


def test_other_host_counts_by_heartbeat(path: Path) -> None:
    write_record(path, host="elsewhere", heartbeat=time.time() - 10)
    with pytest.raises(OutputBusyError, match="host elsewhere"):
        Lock(path)
    write_record(path, host="elsewhere", heartbeat=time.time() - lock_module.PATIENCE_SECONDS - 1)
    Lock(path).release()


def test_reboot_kills_all_owners(path: Path) -> None:
    write_record(path, boot="before")
    Lock(path).release()


def test_other_container_on_this_host_counts_by_heartbeat(path: Path) -> None:
    write_record(path, namespace="pid:[1]", pid=2**22)
    with pytest.raises(OutputBusyError):
        Lock(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_lock_file_no_run_wrote_holds_nobody_off(path: Path, content: str) -> None:
    path.write_text(content)
    Lock(path).release()


def test_one_of_many_takers_wins(path: Path) -> None:
    for _ in range(5):
        write_record(path, started=-1.0)
        takers = [child(RACE, path) for _ in range(4)]
        assert {line(taker) for taker in takers} == {"ready"}
        for taker in takers:
            assert taker.stdin is not None
            taker.stdin.write("go\n")
            taker.stdin.flush()
        assert sorted(line(taker) for taker in takers) == ["busy"] * 3 + ["won"]
        for taker in takers:
            taker.communicate("end\n")


def test_threads_of_one_process_exclude_each_other(path: Path) -> None:
    outcomes: list[str] = []

    def take() -> None:
        try:
            Lock(path)
            outcomes.append("won")
        except OutputBusyError:
            outcomes.append("busy")

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["busy"] * 7 + ["won"]


def test_a_lock_that_was_taken_away_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    lock = Lock(path)
    lock.check()
    write_record(path, token="other")
    lock._thread.join(timeout=10)
    with pytest.raises(JobError, match="another run took over"):
        lock.check()
    lock.release()
    assert (read_holder(path) or {})["token"] == "other"


def test_heartbeat_moves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    with Lock(path):
        first = (read_holder(path) or {})["heartbeat"]
        for _ in range(1000):
            if (read_holder(path) or {})["heartbeat"] > first:
                break
            time.sleep(0.01)
        assert (read_holder(path) or {})["heartbeat"] > first
