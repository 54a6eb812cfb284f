"""Runs a program of `peers/` on rows and takes its measure: rates, memory of its processes, time from the command on.

Knows the protocol of `peers/protocol.py`; knows no engine and no workload.
"""

import hashlib
import json
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PEERS = Path(__file__).parent / "peers"
SAMPLE_SECONDS = 0.2
LAST_LINES = 5  # of a program's complaints that are shown


@dataclass(frozen=True, slots=True)
class Measure:
    """One program on one workload."""

    rows: int
    run_s: float
    ready_s: float  # from the command to ready: imports, weights, compilation, warming up
    first_row_s: float  # from the command to the first finished row
    computed_prompt_tokens: int
    output_tokens: int
    peak_bytes: int  # of the program and its children together
    disturbed: float  # share of all cores that other programs used
    digest: str
    answers: list[list[list[int]]]
    tops: list[list[list[list[float]]]]

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.run_s

    @property
    def rows_per_s_with_load(self) -> float:
        return self.rows / (self.run_s + self.ready_s)

    def summary(self) -> dict[str, Any]:
        fields = ("rows", "run_s", "ready_s", "first_row_s", "computed_prompt_tokens", "output_tokens", "peak_bytes")
        values = {name: getattr(self, name) for name in (*fields, "disturbed", "digest", "rows_per_s")}
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def run_peer(python: str, script: str, rows: list[dict[str, Any]], options: dict[str, Any]) -> Measure:
    """Runs `peers/SCRIPT` with the interpreter. Raises SystemExit with its last words when it fails."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        begin, idle = time.time(), _Others()
        command = [python, str(PEERS / script), str(path), json.dumps(options)]
        with open(Path(place) / "complaints", "w+") as complaints:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True)
            peak = _Peak(process.pid)
            out, _ = process.communicate()
            peak.done.set()
            complaints.seek(0)
            words = complaints.read().splitlines()[-LAST_LINES:]
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise SystemExit("\n".join([f"{script} stopped with {process.returncode}:", *words]))
    return _measure(json.loads(lines[-1]), rows, begin, peak.bytes, idle.share(peak.cpu_seconds))


def _measure(result: dict[str, Any], rows: list[dict[str, Any]], begin: float, peak: int, disturbed: float) -> Measure:
    answers = result["answers"]
    lengths = [[len(tokens) for tokens in samples] for samples in answers]
    if lengths != [[row["max_tokens"]] * row["n"] for row in rows]:
        raise SystemExit(f"answers of other lengths than asked for: {lengths[:3]} ...")
    return Measure(
        rows=len(rows),
        run_s=result["end"] - result["start"],
        ready_s=result["start"] - begin,
        first_row_s=result["first"] - begin,
        computed_prompt_tokens=result["computed_prompt_tokens"],
        output_tokens=sum(map(sum, lengths)),
        peak_bytes=peak,
        disturbed=disturbed,
        digest=hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:12],
        answers=answers,
        tops=result.get("tops", []),
    )


class _Peak(threading.Thread):
    """Watches a process with its children: most resident memory at a time, shared pages in each; processor time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.bytes, self.cpu_seconds = 0, 0.0
        self.done = threading.Event()
        self._pid = pid
        self.start()

    def run(self) -> None:
        while not self.done.wait(SAMPLE_SECONDS):
            try:
                parent = psutil.Process(self._pid)
                family = [parent, *parent.children(recursive=True)]
                self.bytes = max(self.bytes, sum(process.memory_info().rss for process in family))
                spent = sum(sum(process.cpu_times()[:2]) for process in family)
                self.cpu_seconds = max(self.cpu_seconds, spent)
            except psutil.NoSuchProcess:
                continue


class _Others:
    """Processor time of everybody else from now on."""

    def __init__(self) -> None:
        self._start, self._busy = time.time(), _busy_seconds()

    def share(self, own: float) -> float:
        """Of all cores over the time passed, when `own` seconds were spent by the program itself."""
        capacity = (time.time() - self._start) * (psutil.cpu_count() or 1)
        return max(0.0, _busy_seconds() - self._busy - own) / capacity


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)
