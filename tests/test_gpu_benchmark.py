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
import os, sys, time
sys.path[:0] = ["tests/benchmarks", "tests/support"]
from checkout import use_checkout
use_checkout()
from pathlib import Path
from gpu_ahead import fault_of, make_attention, make_model, make_step
from gpu_checks import check_case
from gpu_results import Results
from gpu_workers import Apart, outcomes, started, workers

class Standing:  # in for a GPU: the processes are told to use the CPU
    type = "cuda"
    def __str__(self):
        return "cpu"

def work(results, what):
    results.add("kernels", "begun", number=1)
    if what == "late":
        time.sleep(100)
    if what == "dies":
        os._exit(3)
    results.add("kernels", "done", number=2)

if __name__ == "__main__":
    kinds = ("whole", "dies", "late")
    apart = [Apart(Standing()) for _ in kinds]
    with workers(Standing()) as pool:
        calls = [(check_case, (0, 0, "float32", "cpu")), (check_case, (0, 0, "float32", "abacus"))]
        calls += [(fault_of, (make, 0, "cpu", True)) for make in (make_step, make_attention)]
        calls += [(fault_of, (make_model, 0, kind, "cpu", True)) for kind in ("decode", "prompts", "chess")]
        print(*outcomes(started(pool, calls), lambda: 1000.0), sep="|")
        print(*outcomes(started(pool, [(time.sleep, (100,))]), lambda: 0.1), sep="|")
    sys.stdout, out = sys.stderr, sys.stdout
    for process, kind in zip(apart, kinds):
        results = Results(Path(sys.argv[1]), {})
        process.run(results, ("kernels", kind), 2.0 if kind == "late" else 1000.0, (work, (kind,)))
        print(*(one.get("error", one["name"]) for one in results.records), sep="|", file=out)
"""


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("spread")
    script = folder / "spread.py"
    script.write_text(SPREAD, encoding="utf-8")
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split("|") for line in done.stdout.splitlines()]


def test_checks_run_in_processes_that_end_when_time_is_over(spread):
    off, fault, *made = spread[0]
    assert 0 <= float(off) <= 1
    assert fault == "ValueError: device 'abacus': no kernels for it (there are: cpu, cuda)"
    assert made == ["", "", "", "", "KeyError: 'chess'"]
    assert spread[1] == ["left out"]


def test_a_process_that_faults_or_does_not_end_costs_its_own_work_alone(spread):
    whole, dies, late = spread[2:]
    assert whole == ["begun", "done"]
    assert dies == ["begun", "the process ended with 3"]
    assert late[-1] == "it did not end in 2 s"


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
