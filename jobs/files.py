"""Small files that appear whole or not at all.

Knows bytes and paths; not what is in them.
"""

import json
from contextlib import AbstractContextManager
from typing import IO, Any

from batchgen.pipeline.place import AnyPath
from batchgen.pipeline.storage import ASIDE, storage_of


def write_aside(path: AnyPath) -> AbstractContextManager[IO[bytes]]:
    """A binary file that takes the name `path` when the block ends without an error, and is durable by then."""
    return storage_of(path).whole(path)


def write_json(path: AnyPath, value: Any) -> None:
    """A readable JSON file, whole or not at all. Raises ValueError for NaN and infinities."""
    with write_aside(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: AnyPath) -> Any:
    """The value of a JSON file; None when there is no such file. Raises ValueError naming a broken one."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def remove_asides(directory: AnyPath) -> None:
    """Removes what killed writers left behind."""
    for leftover in directory.glob(f"*{ASIDE}"):
        leftover.unlink(missing_ok=True)
