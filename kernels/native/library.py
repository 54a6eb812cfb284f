"""Opens the shared library of an instruction set and gives it torch's threads. Knows files and processors, no op."""

import ctypes
import re
from functools import cache
from pathlib import Path

import torch

from .sources import digest

NUMBERS = frozenset({torch.float32, torch.bfloat16})  # dtypes that the libraries compute with
SETS = ("avx512", "avx2", "portable")  # best first; the order is batchgen_instruction_set's, reversed
FOLDER = Path(__file__).parent
ENTRIES = ("GOMP_parallel", "omp_get_max_threads")
RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")


@cache
def available() -> tuple[str, ...]:
    """The sets that were built and that this processor can run, best first; empty when nothing was built."""
    portable = FOLDER / "portable.so"
    if not portable.exists():
        return ()
    level = ctypes.CDLL(str(portable)).batchgen_instruction_set()
    return tuple(name for name in SETS[len(SETS) - 1 - level :] if (FOLDER / f"{name}.so").exists())


@cache
def open_library(name: str) -> ctypes.CDLL:
    """The library of an instruction set. Raises ValueError when this machine has none, RuntimeError for a stale one."""
    if name not in available():
        raise ValueError(f"native kernels for {name!r}: not built or not for this processor (there are: {available()})")
    library = ctypes.CDLL(str(FOLDER / f"{name}.so"))
    _require_current(library, name)
    use_threads_of_torch(library)
    return library


def _require_current(library: ctypes.CDLL, name: str) -> None:
    """Calls laid out for other sources would read and write anywhere."""
    expected, built_from = digest(FOLDER.parent), None
    if hasattr(library, "batchgen_sources"):
        library.batchgen_sources.restype = ctypes.c_char_p
        built_from = library.batchgen_sources().decode()
    if expected and built_from != expected:
        raise RuntimeError(
            f"{FOLDER / name}.so was built from other sources than lie there now: run `pip install -e .`"
        )


def arguments(*values: int | float) -> list[ctypes.c_int64 | ctypes.c_double]:
    """Arguments of a function of the library: addresses, counts and truths as int64_t, the others as double."""
    return [ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value) for value in values]


def use_threads_of_torch(library: ctypes.CDLL) -> None:
    """Loops of the library run on torch's OpenMP threads; on the calling thread alone where these can't be reached."""
    runtime = _threads_of_torch()
    if runtime is not None:
        library.batchgen_use_threads(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in ENTRIES))


def _threads_of_torch() -> ctypes.CDLL | None:
    """The OpenMP runtime torch runs on; None when it has none that can be reached."""
    torch.get_num_threads()  # some builds load the runtime with the first use of it
    for path in _mapped_files():
        if RUNTIME.search(path):
            runtime = ctypes.CDLL(path)
            if all(hasattr(runtime, symbol) for symbol in ENTRIES):
                return runtime
    return None


def _mapped_files() -> list[str]:
    """Files mapped into this process that may be an OpenMP runtime; torch's own folder where the system can't tell."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        return sorted({line.split(maxsplit=5)[5].strip() for line in maps.open() if line.count("/")})
    return [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))]
