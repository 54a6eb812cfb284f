"""Files that appear whole or not at all: written aside, made durable, then renamed into place.

Knows paths and the file system only.
"""

import os
from pathlib import Path


def publish(aside: Path, final: Path) -> None:
    """Renames a finished file on the same file system into place; it survives a power cut from then on."""
    sync_file(aside)
    final.parent.mkdir(parents=True, exist_ok=True)
    move(aside, final)


def move(source: Path, target: Path) -> None:
    """Renames over whatever is there, and puts the rename itself on disk."""
    os.replace(source, target)
    sync_directory(target.parent)


def sync_file(path: Path) -> None:
    """Puts what a file holds on disk."""
    _sync(path, os.O_RDWR)


def sync_directory(path: Path) -> None:
    """Puts the names in a directory on disk."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
