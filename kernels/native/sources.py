"""A fingerprint of the C++ sources: a library built from others than those beside it is not to be used.

setup.py loads this file alone.
"""

from hashlib import sha256
from pathlib import Path


def digest(folder: Path) -> str:
    """Of every .cpp and .h below the folder; empty where there are none, as in an installed package."""
    found = sorted(path for kind in ("*.cpp", "*.h") for path in folder.rglob(kind))
    whole = sha256()
    for path in found:
        whole.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return whole.hexdigest() if found else ""
