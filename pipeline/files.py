"""Which files a job's input means: globs, directories and lists become files with a format, in a fixed order.

Knows names and directory layouts, of saved data sets too; opens no data file.
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from .config import InputSettings
from .hub import SCHEME, HubPath, parse_hub_path, pinned_commit, split_urls
from .lines import is_compressed
from .place import AnyPath, RemotePath, below, files_below, is_url, place
from .rows import FileIdentity, Format, InputError, InputFile

_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
_COMPRESSED = {".jsonl", ".ndjson", ".json", ".csv", ".tsv"}  # these may be followed by .gz, .zst or .bz2
_SIDECARS = ("state.json", "dataset_info.json", "dataset_dict.json")


def find_files(settings: InputSettings, base: Path, known: Sequence[FileIdentity] = ()) -> list[InputFile]:
    """The files of `input.path` in reading order, each once; data sets on the Hub at the commit of the `known` ones.

    Raises InputError (exit 2) when there is none.
    """
    finder = _Finder(settings, base.resolve(), known)
    found = {file.path: file for entry in settings.paths for file in finder.entry(entry)}
    if settings.split != "train" and not finder.used_split:
        raise InputError(
            "input.split: only a data set on the Hub and a saved DatasetDict have splits, and input.path names none", 2
        )
    return list(found.values())


class _Finder:
    def __init__(self, settings: InputSettings, base: Path, known: Sequence[FileIdentity]) -> None:
        self._settings = settings
        self._known = known
        self._base = base
        self.used_split = False

    def entry(self, entry: str) -> list[InputFile]:
        return self._hub(parse_hub_path(entry)) if entry.startswith(SCHEME) else self._files(entry)

    def _hub(self, path: HubPath) -> list[InputFile]:
        commit = pinned_commit(path, self._known)
        if path.below:
            return self._files(f"{path.at(commit)}/{path.below}")
        self.used_split = True
        urls = split_urls(path, commit, self._settings.config, self._settings.split)
        return [self._file(place(url, self._base)) for url in urls]

    def _files(self, entry: str) -> list[InputFile]:
        path = place(entry, self._base)
        if path.is_dir():
            found = list(self._directory(path))
        elif path.exists():
            found = [self._file(path)]
        elif isinstance(path, RemotePath):
            found = [self._file(match) for match in _glob_remote(path)]
        else:
            pattern = str(path) if is_url(entry) else str(Path(entry).expanduser())
            found = [self._file(match) for match in _glob(pattern, self._base)]
        if not found:
            raise InputError(f"input.path: {entry} {_nothing(path, entry)}", 2)
        return found

    def _directory(self, path: AnyPath) -> Iterator[InputFile]:
        if (path / "dataset_dict.json").exists():
            yield from self._directory(self._split(path))
        elif (path / "state.json").exists():
            yield from (self._file(path / name, "arrow") for name in _saved_files(path, self._show(path)))
        else:
            yield from self._plain_directory(path)

    def _split(self, path: AnyPath) -> AnyPath:
        splits = _read_json(path / "dataset_dict.json", self._show(path)).get("splits", [])
        if self._settings.split not in splits:
            raise InputError(f"{self._show(path)}: has no split {self._settings.split!r}, only {', '.join(splits)}", 2)
        self.used_split = True
        return path / self._settings.split

    def _plain_directory(self, path: AnyPath) -> list[InputFile]:
        paths = [file for file in _walk(path) if file.name not in _SIDECARS and _suffix(file) in _SUFFIXES]
        formats = sorted({_SUFFIXES[_suffix(file)] for file in paths})
        wanted = self._settings.format
        if wanted == "auto" and len(formats) > 1:
            raise InputError(f"{self._show(path)}: holds {' and '.join(formats)} files, set input.format", 2)
        wanted = "jsonl" if wanted == "openai" else wanted
        return [self._file(file) for file in paths if wanted in ("auto", _SUFFIXES[_suffix(file)])]

    def _file(self, path: AnyPath, kind: Format | None = None) -> InputFile:
        name = self._show(path)
        if self._settings.format in ("parquet", "jsonl", "arrow", "csv", "openai"):
            kind = self._settings.format
        kind = kind or _SUFFIXES.get(_suffix(path))
        if kind is None:
            raise InputError(f"{name}: {_unknown(path.suffix.lower())}", 2)
        return InputFile(path, name, kind)

    def _show(self, path: AnyPath) -> str:
        if isinstance(path, RemotePath):
            return str(path)
        absolute = Path(os.path.abspath(path))
        return str(absolute.relative_to(self._base) if absolute.is_relative_to(self._base) else absolute)


def _suffix(path: AnyPath) -> str:
    """The suffix that tells the format; that of a compression behind it is left out."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if len(suffixes) > 1 and is_compressed(path) and suffixes[-2] in _COMPRESSED:
        return suffixes[-2]
    return path.suffix.lower()


def _walk(path: AnyPath) -> Iterator[AnyPath]:
    """All files below, sorted by path, that are data."""
    return (found for found in files_below(path) if not _is_hidden(below(found, path)))


def _glob_remote(pattern: RemotePath) -> list[RemotePath]:
    """As `_glob`, in a store."""
    named = frozenset(pattern.key.split("/"))
    matches = pattern.matches() if glob.has_magic(pattern.key) else []
    return [match for match in matches if not _is_hidden(PurePath(match.key), named) and match.is_file()]


def _glob(pattern: str, base: Path) -> list[Path]:
    """Files that match, sorted by path, that are data or lie where the pattern names the place in full."""
    matches = sorted(map(Path, glob.glob(pattern, root_dir=base, recursive=True)))
    named = frozenset(Path(pattern).parts)
    return [
        base / match for match in dict.fromkeys(matches) if not _is_hidden(match, named) and (base / match).is_file()
    ]


def _is_hidden(path: PurePath, named: frozenset[str] = frozenset()) -> bool:
    """Whether a folder or the file itself starts with a dot or two underscores: caches, sidecars, outputs' records."""
    return any(part.startswith((".", "__")) and part not in named | {".."} for part in path.parts)


def _saved_files(path: AnyPath, name: str) -> list[str]:
    state = _read_json(path / "state.json", name)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(f"{name}: saved with an indices mapping; save it again after `flatten_indices()`", 2)
    return [entry["filename"] for entry in state.get("_data_files", [])]


def _read_json(path: AnyPath, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: {path.name} is not readable: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{name}: {path.name} does not describe a saved data set")
    return content


def _nothing(path: AnyPath, entry: str) -> str:
    if path.is_dir():
        return "holds no file that can be read (parquet, jsonl, csv or arrow)"
    return "matches no file" if glob.has_magic(entry) else "does not exist"


def _unknown(suffix: str) -> str:
    if suffix in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        return f"compressed files ({suffix}) are read as .jsonl or .csv before .gz, .zst or .bz2 only, decompress it"
    return f"cannot tell the format from the suffix {suffix!r}, set input.format"
