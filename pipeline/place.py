"""Where a file or directory lies: a path on this machine, or one behind fsspec (`s3://`, `memory://`, ...).

Knows names, listings and whole files; what is in a file, and when a file comes into force, is decided elsewhere.
"""

import glob
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from fnmatch import translate
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PACKAGES = {"s3": "batchgen[s3]", "s3a": "batchgen[s3]", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "blob_id")
_MOMENTS = ("mtime", "LastModified", "last_modified", "updated", "created")


class PlaceError(OSError):
    """A remote path cannot be reached: one line with the path and the cure. `exit_code` 2: the path is no good."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What a store tells of a file, under the names of `os.stat`; `version` is its etag, "" where it has none."""

    st_size: int
    st_mtime_ns: int
    version: str


class RemotePath:
    """A path behind fsspec with the part of `pathlib.Path` that inputs and outputs need.

    Stores have no directories of their own, so making one does nothing, and a directory is where something lies.
    Every method raises PlaceError when the store cannot be reached, FileNotFoundError when nothing is there.
    """

    __slots__ = ("_scheme", "filesystem", "key")

    def __init__(self, filesystem: Any, scheme: str, key: str) -> None:
        self.filesystem = filesystem
        self.key = key.rstrip("/")
        self._scheme = scheme

    def __str__(self) -> str:
        return self.key if is_url(self.key) else f"{self._scheme}://{self.key.lstrip('/')}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __lt__(self, other: "RemotePath") -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "RemotePath":
        return self._at(f"{self.key}/{name}")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    @property
    def parent(self) -> "RemotePath":
        return self._at(self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "RemotePath":
        return self.parent / name

    def exists(self) -> bool:
        return bool(self._do("exists"))

    def is_file(self) -> bool:
        return bool(self._do("isfile"))

    def is_dir(self) -> bool:
        return bool(self._do("isdir"))

    def iterdir(self) -> Iterator["RemotePath"]:
        """What lies directly below, sorted."""
        for entry in sorted(self._do("ls", detail=False)):
            if entry.rstrip("/") != self.key:
                yield self._at(entry)

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """All files below whose name fits the pattern, sorted."""
        fits = re.compile(translate(pattern)).match
        found = (self._at(entry) for entry in sorted(self._do("find")) if not entry.endswith("/"))
        return (path for path in found if fits(path.name))

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """The files that fit a pattern relative to this directory, sorted."""
        return (self._at(entry) for entry in sorted(self._do("glob", f"{glob.escape(self.key)}/{pattern}")))

    def matches(self) -> Iterator["RemotePath"]:
        """What fits this path as a pattern, sorted."""
        return (self._at(entry) for entry in sorted(self._do("glob")))

    def stat(self) -> FileStatus:
        info = self._do("info")
        version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
        moment = next((info[name] for name in _MOMENTS if info.get(name)), 0)
        return FileStatus(int(info["size"] or 0), _nanoseconds(moment), version)

    def open(self, mode: str = "rb") -> BinaryIO:
        """A binary file that can be sought in when read; one that is written appears when it is closed."""
        file = self._do("open", self.key, mode)
        if mode == "rb" and isinstance(file, io.BytesIO):  # the one that `memory://` itself holds, with its position
            file = io.BytesIO(file.getvalue())
        return cast(BinaryIO, file)

    def read_bytes(self) -> bytes:
        return bytes(self._do("cat_file"))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Puts the whole file at once; the earlier one, if any, is there until then."""
        self._put(data, "overwrite")

    def create(self, data: bytes) -> None:
        """The same for a file that must not be there yet: of two that try, one gets FileExistsError."""
        self._put(data, "create")

    def copy_to(self, target: "RemotePath") -> None:
        """The same bytes under another name of the same store; they appear at once."""
        self._do("cp_file", self.key, target.key)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._do("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a directory is there with its first file."""

    def _at(self, key: str) -> "RemotePath":
        return RemotePath(self.filesystem, self._scheme, key)

    def _do(self, operation: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self.filesystem, operation)(*(arguments or (self.key,)), **options)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            raise PlaceError(f"{self}: {_explain(error)}") from error

    def _put(self, data: bytes, mode: str) -> None:
        try:
            self._do("pipe_file", self.key, data, mode=mode)
        except FileNotFoundError as error:
            raise PlaceError(f"{self}: the bucket above it does not exist; create it first") from error


AnyPath = Path | RemotePath


def is_url(path: str) -> bool:
    """Whether a path names a file system with `scheme://`."""
    return _URL.match(path) is not None


def place(path: str, base: Path) -> AnyPath:
    """The place that a path in a job file or on the command line means; `base` is what relative ones refer to.

    Raises PlaceError for a file system that is unknown or whose package is missing.
    """
    match = _URL.match(path)
    if match is None:
        return base / Path(path).expanduser()
    scheme = match[1].lower()
    if scheme in ("file", "local"):
        return Path(path[match.end() :])
    return _remote(path, scheme)


def _remote(path: str, scheme: str) -> RemotePath:
    from fsspec.core import url_to_fs  # it takes a moment, and local jobs have no use for it

    try:
        filesystem, key = url_to_fs(path, use_listings_cache=False)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        cure = f"pip install {package}" if package else first_line(error)
        raise PlaceError(f"{path}: the package for {scheme}:// paths is not installed; {cure}", 2) from error
    except ValueError as error:
        cure = "use a local path, s3://, memory:// or another that fsspec knows"
        raise PlaceError(f"{path}: {scheme}:// is not a file system that is known here; {cure}", 2) from error
    return RemotePath(filesystem, scheme, key)


def version_of(path: AnyPath) -> str:
    """The etag of a file, "" where its place has none."""
    return path.stat().version if isinstance(path, RemotePath) else ""


def names_of(path: AnyPath) -> tuple[str, ...]:
    """The names from the root of its file system to the path, links followed; for comparisons."""
    return path.resolve().parts if isinstance(path, Path) else PurePosixPath(str(path)).parts


def matching(directory: AnyPath, pattern: str) -> list[AnyPath]:
    """The files that fit a pattern relative to a directory, sorted."""
    return sorted(directory.glob(pattern), key=_parts)


def files_below(directory: AnyPath) -> list[AnyPath]:
    """Every file in a directory and in those below, sorted."""
    if isinstance(directory, RemotePath):
        return sorted(directory.rglob("*"), key=_parts)
    return sorted((path for path in directory.rglob("*") if path.is_file()), key=_parts)


def _parts(path: AnyPath) -> tuple[str, ...]:
    return PurePosixPath(str(path)).parts


def below(path: AnyPath, directory: AnyPath) -> PurePosixPath:
    """The way from a directory to a path in it."""
    return PurePosixPath(str(path)).relative_to(PurePosixPath(str(directory)))


def open_mapped(path: AnyPath) -> pa.NativeFile:
    """An Arrow file to read at any place, memory-mapped where it can be."""
    return pa.memory_map(str(path)) if isinstance(path, Path) else pa.PythonFile(path.open("rb"), mode="r")


def open_plain(path: AnyPath) -> pa.NativeFile:
    """An Arrow file to read at any place into memory of its own."""
    return pa.OSFile(str(path)) if isinstance(path, Path) else pa.PythonFile(path.open("rb"), mode="r")


def parquet_source(path: AnyPath) -> Path | pa.NativeFile:
    """What pyarrow's Parquet reader opens by itself, and closes."""
    return path if isinstance(path, Path) else open_plain(path)


def create_file(path: AnyPath) -> pa.NativeFile:
    """An Arrow file to write from front to back."""
    return pa.OSFile(str(path), "wb") if isinstance(path, Path) else pa.PythonFile(path.open("wb"), mode="w")


def first_line(error: BaseException) -> str:
    """The start of an exception's message, or its class where it has none."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _explain(error: Exception) -> str:
    kind, text = type(error).__name__, first_line(error)
    if isinstance(error, PermissionError):
        return f"access denied ({text}); check the credentials and their rights"
    if "Credentials" in kind:
        return f"no credentials ({text}); set those of the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if "EndpointConnection" in kind or "Connection" in kind:
        return f"the store cannot be reached ({text}); check the network and the endpoint"
    return f"the store refuses: {text}"


def _nanoseconds(moment: Any) -> int:
    if isinstance(moment, datetime):
        return int(moment.timestamp() * 1e6) * 1000
    try:
        return int(float(moment) * 1e9)
    except (TypeError, ValueError):
        return 0
