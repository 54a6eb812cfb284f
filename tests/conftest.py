"""Stops the run when the tests would import the source folders under a second name (see CONTRIBUTING.md)."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
    raise RuntimeError("the repository root is on sys.path: run `pytest`, not `python -m pytest`, and clear PYTHONPATH")
