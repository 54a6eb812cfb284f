"""The GPU benchmark runs to its end on a CPU, not installed, and without the packages that it can do without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WITHOUT = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in f"{finder!r} {finder.__module__}"]
for name in ("pydantic", "llguidance", "datasets", "pyarrow"):
    sys.modules[name] = None
sys.argv = ["gpu.py", "--smoke", *sys.argv[1:]]
runpy.run_path("tests/benchmarks/gpu.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("gpu")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return {"json": json.loads((out / "gpu.json").read_text()), "table": (out / "gpu.md").read_text()}


def test_every_part_ends_and_nothing_is_wrong_or_left_out(found):
    records = found["json"]["records"]
    parts = {record["part"] for record in records}
    assert parts == {"limits", "checks", "kernels", "generation"}
    assert all("skipped" not in record and "error" not in record for record in records)
    assert all(record.get("ok", True) for record in records)


SPREAD = """
import sys
sys.path[:0] = ["tests/benchmarks", "tests/support"]
from checkout import use_checkout
use_checkout()
from gpu_checks import check_case
from gpu_kernels import make_step
from gpu_workers import outcomes, started, workers

class Standing:  # in for a GPU: the processes are told to use the CPU
    type = "cuda"
    def __str__(self):
        return "cpu"

if __name__ == "__main__":
    with workers(Standing()) as pool:
        calls = started(pool, check_case, [(0, 0, "float32", "cpu"), (0, 0, "float32", "abacus")])
        calls += started(pool, make_step, [(0, "cpu", True)])
        print(*outcomes(calls, lambda: 100.0), sep="|")
        print(*outcomes(started(pool, __import__("time").sleep, [(100,)]), lambda: 0.1), sep="|")
"""


def test_checks_run_in_processes_that_end_when_time_is_over(tmp_path):
    script = tmp_path / "spread.py"
    script.write_text(SPREAD, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (off, fault, made), (late,) = (line.split("|") for line in done.stdout.splitlines())
    assert 0 <= float(off) <= 1
    assert fault == "ValueError: device 'abacus': no kernels for it (there are: cpu, cuda)"
    assert made == "None"
    assert late == "left out"


def test_every_workload_stands_beside_its_bound(found):
    rows = [one for one in found["json"]["records"] if one["part"] == "generation" and "kv_tokens" not in one]
    assert {name.split(":")[0] for name in (one["name"] for one in rows)} == {
        "8B native, KV bfloat16",
        "8B fp8, KV fp8",
        "8B int4, KV fp8",
    }
    assert all(one["of_roofline"] > 0 for one in rows)
    for kind in ("decode 2", "prefill", "shared +", "sharing off", "5/4"):
        assert sum(kind in one["name"] for one in rows) >= 3


def test_the_table_has_every_record(found):
    assert found["table"].count("\n| ") >= len(found["json"]["records"])


def test_a_part_without_time_says_what_it_left_out(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "tests/benchmarks/gpu.py",
            "--smoke",
            "--part",
            "kernels",
            "--minutes",
            "0",
            "--out",
            tmp_path,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "gpu.json").read_text())["records"]
    assert all("skipped" in record for record in records if record["part"] == "kernels")
