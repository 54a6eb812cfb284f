"""Sends files to a data set repository of the Hub: staged one by one, then one commit, with patience for a busy Hub.

Knows the calls of huggingface_hub and which of its errors pass; what is sent is decided elsewhere.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from .errors import JobError, UsageError

T = TypeVar("T")

_ATTEMPTS = 8
_LONGEST_WAIT = 300.0  # seconds, also where the Hub asks for more
_PASSING = frozenset({409, 412, 429})


class HubRepo:
    """One branch of a data set repository. Every method raises JobError when the Hub refuses or stays away."""

    def __init__(self, name: str, revision: str | None) -> None:
        from huggingface_hub import HfApi, get_token

        if get_token() is None:
            raise UsageError("no Hub token; set HF_TOKEN or log in with `hf auth login`")
        self.name = name
        self._revision = revision
        self._api = HfApi()
        self._additions: list[Any] = []

    def create(self, private: bool) -> None:
        """Makes the repository and the branch where they do not exist. A public one is never taken for a private."""
        visibility = True if private else None
        self._do(lambda: self._api.create_repo(self.name, repo_type="dataset", private=visibility, exist_ok=True))
        if private and not self._do(lambda: self._api.repo_info(self.name, repo_type="dataset")).private:
            raise UsageError(f"{self.name}: exists and is public; make it private on the Hub, or leave --private out")
        if self._revision is not None:
            branch = self._revision
            self._do(lambda: self._api.create_branch(self.name, branch=branch, repo_type="dataset", exist_ok=True))

    def files(self) -> list[str]:
        """The paths in the branch."""
        return list(
            self._do(lambda: self._api.list_repo_files(self.name, repo_type="dataset", revision=self._revision))
        )

    def read(self, path: str, scratch: Path) -> str:
        """A text file of the branch."""
        local = self._do(
            lambda: self._api.hf_hub_download(
                self.name, path, repo_type="dataset", revision=self._revision, local_dir=scratch
            )
        )
        return Path(local).read_text(encoding="utf-8")

    def stage(self, path: str, content: Path | bytes) -> bool:
        """Sends a file ahead of the commit; False if its content goes with the commit and must stay until then.

        Content that the Hub has already is not sent again.
        """
        from huggingface_hub import CommitOperationAdd

        addition = CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
        self._do(
            lambda: self._api.preupload_lfs_files(
                self.name, [addition], repo_type="dataset", revision=self._revision, free_memory=True
            )
        )
        self._additions.append(addition)
        return bool(addition.path_or_fileobj == b"" and content != b"")

    def commit(self, message: str, obsolete: list[str]) -> tuple[str, bool]:
        """Puts everything staged in force at once and removes `obsolete`; the commit, and whether it is new."""
        from huggingface_hub import CommitOperationDelete

        before = self._head()
        operations = [*self._additions, *(CommitOperationDelete(path) for path in obsolete)]
        found = self._do(
            lambda: self._api.create_commit(
                self.name, operations, commit_message=message, repo_type="dataset", revision=self._revision
            )
        )
        return str(found.oid), found.oid != before

    def _head(self) -> str | None:
        info = self._do(lambda: self._api.repo_info(self.name, repo_type="dataset", revision=self._revision))
        return info.sha

    def _do(self, work: Callable[[], T]) -> T:
        for attempt in range(_ATTEMPTS):
            try:
                return work()
            except Exception as error:
                wait = _wait(error, attempt)
                if wait is None or attempt == _ATTEMPTS - 1:
                    raise _explained(self.name, error) from error
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


def _wait(error: Exception, attempt: int) -> float | None:
    """Seconds until another attempt can help; None when it cannot."""
    response = _response(error)
    if response is None:
        return _backoff(attempt) if any(_is_broken_connection(cause) for cause in _causes(error)) else None
    if response.status_code not in _PASSING and response.status_code < 500:
        return None
    asked = response.headers.get("Retry-After", "")
    return min(float(asked), _LONGEST_WAIT) if asked.isdecimal() else _backoff(attempt)


def _backoff(attempt: int) -> float:
    return min(2.0**attempt, _LONGEST_WAIT) * random.uniform(0.75, 1.25)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _response(error: BaseException) -> Any:
    found = (getattr(cause, "response", None) for cause in _causes(error))
    return next((response for response in found if response is not None), None)


def _is_broken_connection(error: BaseException) -> bool:
    """Errors of huggingface_hub's HTTP client, whichever it is, are known by their names."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "NetworkError", "TimeoutException", "ConnectionError", "TimeoutError"})


def _explained(name: str, error: Exception) -> JobError:
    response = _response(error)
    if response is None:
        if any(_is_broken_connection(cause) for cause in _causes(error)):
            return JobError(
                f"{name}: the Hub cannot be reached ({_first_line(error)}); what was sent is not sent again"
            )
        return JobError(f"{name}: {_first_line(error)}")
    if response.status_code in (401, 403):
        return UsageError(f"{name}: the Hub refuses the token; it needs the right to write to this repository")
    if response.status_code == 404:
        return UsageError(f"{name}: not found on the Hub, or the token may not see it")
    return JobError(
        f"{name}: the Hub answers {response.status_code} ({_first_line(error)}); give the same command again, "
        "what was sent is not sent again"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
