"""Small files that appear whole or not at all.

Knows bytes and paths; not what is in them.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from batchgen.pipeline.publish import move

ASIDE = ".part"  # names that end so are never read, and removed by the next run


@contextmanager
def write_aside(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the name `path` when the block ends without an error, and is on disk by then."""
    aside = path.with_name(f"{path.name}.{os.getpid()}{ASIDE}")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """A readable JSON file, whole or not at all. Raises ValueError for NaN and infinities."""
    with write_aside(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value of a JSON file; None when there is no such file. Raises ValueError naming a broken one."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def remove_asides(directory: Path) -> None:
    """Removes what killed writers left behind."""
    for leftover in directory.glob(f"*{ASIDE}"):
        leftover.unlink(missing_ok=True)
