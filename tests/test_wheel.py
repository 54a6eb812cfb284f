"""What is in the wheel is what is in the tree, and it works without the tree."""

import os
import platform
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import setuptools

from batchgen.kernels.native.library import SETS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("jobs", "pipeline", "engine", "kernels")


def copy_tree(copy: Path) -> None:
    """What a clone of the working tree would hold."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in files.stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())


def build_wheel(tree: Path, folder: Path, environment: dict[str, str] | None = None) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(tree)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy_tree(folder / "tree")
    return build_wheel(folder / "tree", folder)


def test_every_module_of_the_tree_is_in_the_wheel(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("batchgen/")}
    inside -= {f"batchgen/kernels/native/{name}.so" for name in SETS}
    tree = {f"batchgen/{path.relative_to(ROOT)}" for folder in FOLDERS for path in _packaged(ROOT / folder)}
    assert inside == tree


def _packaged(folder: Path) -> Iterator[Path]:
    return chain(folder.rglob("*.py"), folder.rglob("*.html"))


@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
def test_the_native_libraries_are_in_the_wheel(wheel):
    built = {Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert built == (set(SETS) if platform.machine() == "x86_64" else {"portable"})


def test_without_a_compiler_the_wheel_is_built_all_the_same(tmp_path):
    copy = tmp_path / "tree"
    copy_tree(copy)
    environment = os.environ | dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), "/nonexistent/compiler")
    names = zipfile.ZipFile(build_wheel(copy, tmp_path, environment)).namelist()
    assert "batchgen/kernels/tables.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_a_library_that_is_built_again_takes_the_place_of_a_whole_one(tmp_path, monkeypatch):
    given, seen = {}, []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"old")
    new.write_bytes(b"new")

    def replace(aside, place):
        seen.append((Path(aside).read_bytes(), Path(place).read_bytes()))
        Path(aside).rename(place)

    monkeypatch.setattr(os, "replace", replace)
    given["cmdclass"]["build_ext"](setuptools.Distribution()).copy_file(str(new), str(old))
    assert seen == [(b"new", b"old")]
    assert (old.read_bytes(), sorted(tmp_path.iterdir())) == (b"new", [new, old])


def test_the_package_list_names_every_folder():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {
        "batchgen." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == folders


def test_the_installed_wheel_runs(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import batchgen; batchgen.__path__ = [p for p in batchgen.__path__ if p.startswith(sys.path[0])]\n"
        "import batchgen.engine as engine; assert engine.__file__.startswith(sys.path[0]), engine.__file__\n"
        "sys.argv = ['batchgen', 'schema']; from batchgen.jobs.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import site; site.main()\n{code}"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert '"properties"' in done.stdout
