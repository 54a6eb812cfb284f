"""A directory that appears whole or not at all: filled aside, made durable, renamed.

Knows the file system; what is put into it is its caller's.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen.pipeline.publish import move, sync_directory, sync_file

from .errors import UsageError


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """An empty directory that takes the name `out` when the block ends without an error.

    Raises UsageError, before the block, when there is something at `out` already.
    """
    _require_free(out)
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.iterdir():
            (sync_directory if path.is_dir() else sync_file)(path)
        sync_directory(aside)
        if out.exists():
            out.rmdir()
        move(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _require_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file; name a new directory")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out}: is not empty; name a new directory, or remove it")
