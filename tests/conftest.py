"""Stops the run when the tests would import the source folders under a second name (see CONTRIBUTING.md).

Keeps what was measured on this machine for real jobs out of it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
    raise RuntimeError("the repository root is on sys.path: run `pytest`, not `python -m pytest`, and clear PYTHONPATH")


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations and tuned kernels of the user are not those of the tests, nor the other way round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
