"""Data sets on the Hub as input: which files of a repository a configuration and split mean, all of one commit.

Knows how `datasets` finds data files and how the Hub's errors are told; files are read like any others behind fsspec.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from .place import first_line
from .rows import FileIdentity, InputError

SCHEME = "hf://"
_PATH = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/+(.*))?")


@dataclass(frozen=True, slots=True)
class HubPath:
    """`hf://datasets/ORG/NAME[@REVISION][/BELOW]`; `below` names files of the repository, "" the data set itself."""

    repo: str
    revision: str | None
    below: str

    @property
    def name(self) -> str:
        """As users write it, without what is below."""
        return f"hf://datasets/{self.repo}" + (f"@{self.revision}" if self.revision else "")

    def at(self, commit: str) -> str:
        """The path of the repository at a commit."""
        return f"hf://datasets/{self.repo}@{commit}"


def parse_hub_path(path: str) -> HubPath:
    """Raises ValueError for anything but a data set."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise ValueError(f"{path}: must look like hf://datasets/ORG/NAME or hf://datasets/ORG/NAME@REVISION")
    return HubPath(match[1], unquote(match[2]) if match[2] else None, (match[3] or "").strip("/"))


def pinned_commit(path: HubPath, known: Sequence[FileIdentity]) -> str:
    """The commit that a job reads: that of the files it `known`s already, else the newest of the revision.

    Raises InputError when the Hub does not tell it.
    """
    prefix = path.at("")
    found = next((entry.path for entry in known if entry.path.startswith(prefix)), None)
    if found is not None:
        return found.removeprefix(prefix).partition("/")[0]
    from huggingface_hub import HfApi

    with _explained(path):
        return str(HfApi().dataset_info(path.repo, revision=path.revision).sha)


def split_urls(path: HubPath, commit: str, config: str | None, split: str) -> list[str]:
    """The data files of a split, in the order of `datasets`, as `hf://` paths at the commit. Raises InputError."""
    from datasets import load_dataset_builder

    with _explained(path):
        files: Any = load_dataset_builder(path.repo, name=config, revision=commit).config.data_files
    if not files or split not in files:
        raise InputError(f"input.split: {path.name} has no split {split!r}, only {', '.join(map(str, files or ()))}", 2)
    return [str(url) for url in files[split]]


@contextmanager
def _explained(path: HubPath) -> Iterator[None]:
    """Turns what the client libraries raise into one line with the cure."""
    try:
        yield
    except Exception as error:
        raise _as_input_error(path, error) from error


def _as_input_error(path: HubPath, error: Exception) -> InputError:
    names = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    text = first_line(error)
    if "gated" in text.lower() or "GatedRepoError" in names:
        return InputError(f"{path.name}: is gated; ask for access on its page and set HF_TOKEN to your token", 2)
    if "RevisionNotFoundError" in names:
        return InputError(f"{path.name}: the data set has no revision {path.revision!r}", 2)
    if names & {"RepositoryNotFoundError", "DatasetNotFoundError"} or _status(error) in (401, 403, 404):
        cure = "check the name, or set HF_TOKEN to a token that may read it"
        return InputError(f"{path.name}: not found on the Hub, or private; {cure}", 2)
    if isinstance(error, ValueError) and "config" in text.lower():
        reason = " ".join(str(error).partition("Example of usage")[0].split())
        return InputError(f"input.config: {path.name}: {reason[:300]}", 2)
    if names & {"EmptyDatasetError", "DataFilesNotFoundError"}:
        return InputError(f"{path.name}: holds no file that can be read (parquet, jsonl, csv or arrow)", 2)
    if names & {"TransportError", "NetworkError", "TimeoutException", "ConnectionError", "OfflineModeIsEnabled"}:
        return InputError(
            f"{path.name}: the Hub cannot be reached ({text}); check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        )
    return InputError(f"{path.name}: the Hub refuses: {text}")


def _status(error: BaseException) -> int | None:
    """What the Hub answered, if it did."""
    responses = (getattr(cause, "response", None) for cause in _causes(error))
    return next((int(response.status_code) for response in responses if response is not None), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
