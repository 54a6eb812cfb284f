"""Tells the world that a run has ended: hands the manifest to a command or a webhook.

Knows how to reach them and when to give up; a hook that fails is a warning, never the end of a run.
"""

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
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
            raise HookError(f"{words[0]}: was still running after {COMMAND_SECONDS:.0f} s") from error
        finally:
            _kill_group(process)
        if process.returncode:
            last = said.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise HookError(": ".join([words[0], f"exit code {process.returncode}", *last]))


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                response.read()
        except urllib.error.HTTPError as error:
            said = f"{self.shown_url}: {error.code} {error.reason}"
            if error.code not in _WORTH_A_RETRY:
                raise HookError(said) from error
            raise _RetryableError(said, _seconds(error.headers.get("Retry-After"))) from error
        except OSError as error:  # URLError, timeouts and broken connections
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
