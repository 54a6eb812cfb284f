"""What the GPU benchmark found, written as it comes: JSON for programs, a Markdown table for people; and its clock.

Knows records and seconds; what is measured is not known here.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from batchgen.engine.tuning import median_seconds


@dataclass
class Results:
    """Records of one run; every `add` rewrites both files, so that what was found survives whatever comes next."""

    folder: Path
    machine: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: str, name: str, **fields: Any) -> None:
        self.records.append({"part": part, "name": name, **fields})
        shown = ", ".join(f"{key} {_short(value)}" for key, value in fields.items())
        print(f"[{part}] {name}: {shown}", flush=True)
        self.write()

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "gpu.json").write_text(json.dumps({"machine": self.machine, "records": self.records}, indent=1))
        (self.folder / "gpu.md").write_text(self.markdown())

    @property
    def wrong(self) -> list[str]:
        return [f"{record['part']}: {record['name']}" for record in self.records if record.get("ok") is False]

    def markdown(self) -> str:
        lines = [", ".join(f"{key} {value}" for key, value in self.machine.items()), ""]
        for part in dict.fromkeys(record["part"] for record in self.records):
            own = [record for record in self.records if record["part"] == part]
            columns = list(dict.fromkeys(key for record in own for key in record if key != "part"))
            lines += [f"## {part}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            lines += [f"| {' | '.join(_short(record.get(key, '')) for key in columns)} |" for record in own]
            lines.append("")
        return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Budget:
    """The time of one part. What is not begun in it is left out, and said so."""

    results: Results
    part: str
    end: float

    @classmethod
    def of(cls, results: Results, part: str, seconds: float) -> "Budget":
        return cls(results, part, time.perf_counter() + seconds)

    def left(self) -> float:
        return self.end - time.perf_counter()

    def measure(self, name: str, expected: float, call: Callable[[], dict[str, Any]]) -> None:
        """Adds what `call` finds, or why there is nothing: no time left for `expected` seconds, or what it raised."""
        if expected > self.left():
            self.results.add(self.part, name, skipped=f"needs about {expected:.0f} s, {max(0, self.left()):.0f} s left")
            return
        began = time.perf_counter()
        try:
            found = call()
        except Exception as error:  # one measurement that fails must not cost the others
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        self.results.add(self.part, name, **found, wall_s=round(time.perf_counter() - began, 2))


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The median of some calls, after one or two to warm up."""
    call()
    if device.type == "cuda":
        return median_seconds(call)
    call()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[1]
