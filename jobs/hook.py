"""Tells the world that a run has ended: hands the manifest to a command or a webhook.

Knows how to reach them and when to give up; a hook that fails is a warning, never the end of a run.
"""

import http.client
import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

PAUSES = (1.0, 4.0, 16.0)  # seconds between tries, unless the server names a time
TIMEOUT_SECONDS = 30.0  # of one request
COMMAND_SECONDS = 300.0
LONGEST_PAUSE = 60.0
_WORTH_A_RETRY = {408, 409, 425, 429, 500, 502, 503, 504}


class HookError(Exception):
    """The hook was not reached, or refused; the message says why."""


class Hook(Protocol):
    """Something that takes a manifest. Raises HookError."""

    def __call__(self, manifest: dict[str, Any]) -> None: ...


class NoHook:
    """Nobody wants to know."""

    def __call__(self, manifest: dict[str, Any]) -> None:
        pass


def make_hook(on_finish: str | None, directory: Path) -> Hook:
    """The hook of `run.on_finish`; a command runs in `directory`."""
    if on_finish is None:
        return NoHook()
    return Webhook(on_finish) if is_url(on_finish) else Command(on_finish, directory)


def is_url(on_finish: str) -> bool:
    """Whether `run.on_finish` names a webhook; anything else is a command."""
    return on_finish.lower().startswith(("http://", "https://"))


def require_hook(on_finish: str) -> None:
    """Raises ValueError for what can be neither a command line nor the URL of a webhook."""
    if is_url(on_finish):
        _require_url(on_finish)
        return
    try:
        words = shlex.split(on_finish)
    except ValueError as error:
        raise ValueError(f"is no command line: {error}") from error
    if not words:
        raise ValueError("must be a command or an http(s) URL, got only blanks")
    if "\0" in on_finish:
        raise ValueError("is no command line: holds a null character")


def _require_url(url: str) -> None:
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("is no URL: holds a blank or another character that must be written as %XX")
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"is no URL: {error}") from error
    if not has_host:
        raise ValueError("is no URL: names no host")
    if parts.username is not None:
        raise ValueError("a webhook takes no user and password in its URL; use a token in the path or the query")


@dataclass(frozen=True)
class Command:
    """A command line, split as a shell would but run without one; the manifest is its standard input.

    A command that outlasts COMMAND_SECONDS is killed with all that it started.
    """

    line: str
    directory: Path

    def __call__(self, manifest: dict[str, Any]) -> None:
        words = shlex.split(self.line)
        try:
            process = subprocess.Popen(
                words, cwd=self.directory, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise HookError(f"{words[0]}: {error.strerror}") from error
        try:
            _, said = process.communicate(json.dumps(manifest).encode(), COMMAND_SECONDS)
        except subprocess.TimeoutExpired as error:
            _kill_group(process)
            raise HookError(f"{words[0]}: was still running after {COMMAND_SECONDS:.0f} s") from error
        except BaseException:
            _kill_group(process)
            raise
        if process.returncode:
            last = said.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise HookError(": ".join([words[0], f"exit code {process.returncode}", *last]))


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """The command and what it started, which may outlast it and hold its standard error."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without the manifest; so the answer counts as a refusal."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True)
class Webhook:
    """An http(s) URL that gets the manifest as a JSON POST; busy and broken servers are asked again."""

    url: str
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, manifest: dict[str, Any]) -> None:
        body = json.dumps(manifest).encode()
        for pause in PAUSES:
            try:
                self._post(body)
                return
            except _RetryableError as error:
                self.sleep(min(LONGEST_PAUSE, pause if error.after is None else error.after))
        try:
            self._post(body)
        except _RetryableError as error:
            raise HookError(f"{error} ({len(PAUSES) + 1} times)") from error

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "batchgen"}
        request = urllib.request.Request(self.url, body, headers, method="POST")
        try:
            with _OPENER.open(request, timeout=TIMEOUT_SECONDS) as response:
                response.read()
        except urllib.error.HTTPError as error:
            said = f"{self.shown_url}: {error.code} {error.reason}"
            if error.code not in _WORTH_A_RETRY:
                raise HookError(said) from error
            raise _RetryableError(said, _seconds(error.headers.get("Retry-After"))) from error
        except (OSError, http.client.HTTPException) as error:  # URLError, timeouts, broken connections, no HTTP
            raise _RetryableError(f"{self.shown_url}: {getattr(error, 'reason', error)}") from error

    @property
    def shown_url(self) -> str:
        """Without the path and query, which often hold a secret."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.split('/')[0].split('?')[0].rpartition('@')[2]}"


class _RetryableError(Exception):
    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds a number or a date."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
