"""How files come into force: on this machine by fsync and rename, in a store by puts and copies of whole objects.

Knows the two kinds of places and what each can do at once; which files there are is decided elsewhere.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Protocol

from .place import AnyPath, RemotePath
from .publish import move as move_file
from .publish import publish as publish_file
from .publish import sync_directory as sync_names

ASIDE = ".part"  # names that end so are never read, and removed by the next run


class Storage(Protocol):
    """What a kind of place does in its own way, with paths of that kind."""

    def whole(self, path: Any) -> AbstractContextManager[IO[bytes]]:
        """A small binary file that is there, and durable, when the block ends without an error."""
        ...

    def publish(self, aside: Any, final: Any) -> None:
        """Gives a finished file of the same place its final name; it is durable from then on."""
        ...

    def move(self, source: Any, target: Any) -> None:
        """Over whatever is there. A kill leaves the source until the target is whole."""
        ...

    def move_directory(self, source: Any, target: Any, known: set[str]) -> None:
        """All files at once where the place can do that, else none; not when others than `known` are in the target."""
        ...

    def sync(self, directory: Any) -> None:
        """Makes the names in a directory durable."""
        ...

    def remove_tree(self, directory: Any) -> None:
        """Removes everything below, if there is anything."""
        ...

    def scratch(self, directory: Any) -> Path:
        """Where on this machine a run may keep what it does not need again; not made yet."""
        ...


class LocalStorage:
    """Files of this machine: renamed into place and synced."""

    @contextmanager
    def whole(self, path: Path) -> Iterator[IO[bytes]]:
        aside = path.with_name(f"{path.name}.{os.getpid()}{ASIDE}")
        try:
            with open(aside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            move_file(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def publish(self, aside: Path, final: Path) -> None:
        publish_file(aside, final)

    def move(self, source: Path, target: Path) -> None:
        move_file(source, target)

    def move_directory(self, source: Path, target: Path, known: set[str]) -> None:
        if not source.is_dir() or (target.exists() and any(path.name not in known for path in target.iterdir())):
            return
        if target.exists():
            target.rename(source.with_name(f"{source.name}.earlier"))
        move_file(source, target)

    def sync(self, directory: Path) -> None:
        sync_names(directory)

    def remove_tree(self, directory: Path) -> None:
        if directory.exists():
            shutil.rmtree(directory)

    def scratch(self, directory: Path) -> Path:
        return directory / "scratch"


class ObjectStorage:
    """Objects of a store: each is put whole, none can be renamed or appended to, and a put is durable."""

    @contextmanager
    def whole(self, path: RemotePath) -> Iterator[IO[bytes]]:
        file = BytesIO()
        yield file
        path.write_bytes(file.getvalue())

    def publish(self, aside: RemotePath, final: RemotePath) -> None:
        self.move(aside, final)

    def move(self, source: RemotePath, target: RemotePath) -> None:
        source.copy_to(target)
        source.unlink(missing_ok=True)

    def move_directory(self, source: RemotePath, target: RemotePath, known: set[str]) -> None:
        """A store moves no directory: its files are moved one by one."""

    def sync(self, directory: RemotePath) -> None:
        """Nothing: what was put is durable."""

    def remove_tree(self, directory: RemotePath) -> None:
        with suppress(FileNotFoundError):
            for path in list(directory.rglob("*")):
                path.unlink(missing_ok=True)

    def scratch(self, directory: RemotePath) -> Path:
        return Path(tempfile.mkdtemp(prefix="batchgen-"))


_STORAGES: dict[type, Storage] = {RemotePath: ObjectStorage()}
_LOCAL: Storage = LocalStorage()


def storage_of(path: AnyPath) -> Storage:
    """What the kind of place that a path lies in does."""
    return _STORAGES.get(type(path), _LOCAL)


def publish(aside: AnyPath, final: AnyPath) -> None:
    """`Storage.publish`."""
    storage_of(final).publish(aside, final)


def move(source: AnyPath, target: AnyPath) -> None:
    """`Storage.move`."""
    storage_of(source).move(source, target)


def sync_directory(path: AnyPath) -> None:
    """`Storage.sync`."""
    storage_of(path).sync(path)


def remove_tree(path: AnyPath) -> None:
    """`Storage.remove_tree`."""
    storage_of(path).remove_tree(path)
