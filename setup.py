"""Builds the native kernels: every .cpp of kernels/, once per instruction set, as a plain shared library.

A machine without a compiler installs all the same. How to add a source: see kernels/native/__init__.py.
"""

import os
import platform
import sys
from glob import glob
from pathlib import Path
from runpy import run_path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(glob("kernels/**/*.cpp", recursive=True))
HEADERS = sorted(glob("kernels/**/*.h", recursive=True))
FLAGS = [
    "-std=c++17",
    "-pthread",
    "-O3",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
X86 = {
    "avx512": [*(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16", "vnni")), "-mfma"],
    "avx2": ["-mavx2", "-mfma"],
}
MADE = Path("build/native")  # a header that says which sources a library is built from
IN_TREE = Path("kernels/native")  # where an editable install keeps them
SETS = {"portable": [], **(X86 if platform.machine().lower() in ("x86_64", "amd64") else {})}


class BuildLibraries(build_ext):
    """Keeps the object files of the instruction sets apart, and gives the libraries names without a Python version."""

    def build_extensions(self) -> None:
        digest = run_path("kernels/native/sources.py")["digest"](Path("kernels"))
        MADE.mkdir(parents=True, exist_ok=True)
        (MADE / "sources.h").write_text(f'#define BATCHGEN_SOURCES "{digest}"\n', encoding="ascii")
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        shared, self.build_temp = self.build_temp, str(Path(self.build_temp) / ext.name)
        try:
            super().build_extension(ext)
        except Exception as error:  # setuptools goes on without an optional library: not with the one built before
            for stale in (
                Path(self.get_ext_fullpath(ext.name)),
                IN_TREE / self.get_ext_filename(ext.name.split(".")[-1]),
            ):
                stale.unlink(missing_ok=True)
            print(f"{ext.name} was not built, see the compiler's messages above: {error}", file=sys.stderr)
            raise
        finally:
            self.build_temp = shared

    def copy_file(self, infile: Any, outfile: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """Beside its place, then renamed: who opens a library meanwhile finds a whole one, the old or the new."""
        aside = f"{outfile}.{os.getpid()}"
        _, copied = super().copy_file(infile, aside, *arguments, **options)
        os.replace(aside, outfile)
        return outfile, copied

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + ".so"


setup(
    ext_modules=[
        Extension(
            f"batchgen.kernels.native.{name}",
            SOURCES,
            depends=HEADERS,
            include_dirs=[str(MADE)],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for name, flags in SETS.items()
    ],
    cmdclass={"build_ext": BuildLibraries},
)
