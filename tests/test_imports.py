"""The arrows between the packages go down only, and what need not load torch does not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jobs", "pipeline", "engine", "kernels")
BELOW = {
    "jobs": {"pipeline", "engine", "kernels"},
    "pipeline": {"engine"},
    "engine": {"kernels"},
    "kernels": set(),
}
# what pipeline may use of the engine: the nouns, the plan, and the facade itself
ENGINE_FOR_PIPELINE = {
    "",
    "request",
    "plan",
    "stopping",
    "detokenize",
    "generation",
    "config",
    "explain",
    "grammar",
    "tail",
}
WITHOUT_TORCH = (
    "admission",
    "residents",
    "blocks",
    "scheduler",
    "sequence",
    "request",
    "intake",
    "plan",
    "forecast",
    "items",
    "stopping",
    "detokenize",
    "config",
    "explain",
    "statistics",
    "processor",
    "memory",
    "rates_cache",
    "draft.table",
)


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, in functions and under TYPE_CHECKING as well."""
    package = ["batchgen", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_go_down(path):
    own = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] in PACKAGES:
            pytest.fail(f"{name}: import it as batchgen.{name}")
        if parts[0] != "batchgen" or len(parts) < 2 or parts[1] == own:
            continue
        assert parts[1] in BELOW[own], f"{own} must not import {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "pipeline").rglob("*.py")), ids=lambda path: path.stem)
def test_pipeline_sees_only_the_nouns_of_the_engine(path):
    for name in imported(path):
        parts = name.split(".")
        if parts[:2] == ["batchgen", "engine"]:
            inner = parts[2] if len(parts) > 2 and (ROOT / "engine" / f"{parts[2]}.py").exists() else ""
            assert inner in ENGINE_FOR_PIPELINE, f"{path.name} imports {name}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.split())


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_decisions_are_made_without_tensors(name):
    assert not loaded_by(f"import batchgen.engine.{name}") & {"torch", "transformers"}


def test_the_folders_are_not_importable_by_their_bare_names():
    done = subprocess.run([sys.executable, "-c", "import kernels"], capture_output=True, text=True, cwd="/")
    assert "ModuleNotFoundError" in done.stderr


def test_importing_sets_no_environment_variable():
    modules = "batchgen.engine.engine, batchgen.jobs.cli"
    code = f"import os; before = dict(os.environ); import {modules}; print(before == dict(os.environ))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "True"
