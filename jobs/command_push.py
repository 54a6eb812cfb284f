"""`batchgen push`: a finished output becomes a data set repository on the Hub, in one commit.

Knows the order of the steps and what is told about them; files, card and the Hub's calls are in modules of their own.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .card import write_card
from .document import parse_yaml
from .errors import UsageError
from .hub import HubRepo
from .hub_files import HubFile, HubLayout, arrow_schema, example_rows, hub_files
from .manifest import Manifest
from .output import SIDECAR
from .status import read_status

_EXAMPLES = 3
_CARD = "README.md"
_REPO = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/(?=.{1,96}$)\w([\w.-]*\w)?", re.ASCII)
_WORD = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class PushOptions:
    """Where in the repository an output goes. `revision`: a branch, made where it does not exist."""

    private: bool = False
    split: str = "train"
    config: str = "default"
    revision: str | None = None
    dry_run: bool = False


def push_output(output: Path, repo: str, options: PushOptions) -> Iterator[str]:
    """Sends a finished output; lines tell what is done. Raises UsageError for one that is not finished, JobError."""
    manifest = _finished(output)
    _require_names(repo, options)
    layout = HubLayout(options.config, options.split)
    files = hub_files(output, manifest, layout)
    if options.dry_run:
        yield from _plan(repo, options, files, _card("", output, layout, manifest, files))
        return
    hub = HubRepo(repo, options.revision)
    hub.create(options.private)
    yield from _send(hub, output, layout, manifest, files)


def _finished(output: Path) -> Manifest:
    status = read_status(output)
    manifest = Manifest.load(output / SIDECAR / "manifest.json")
    if status.alive or status.state != "finished" or status.left or manifest is None:
        raise UsageError(
            f"{output}: {status.state}, {status.left} of {status.rows} rows left; only a finished output can be pushed"
        )
    return manifest


def _require_names(repo: str, options: PushOptions) -> None:
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{repo}: must be the id of a data set repository like ORG/NAME")
    for name, value in (("--split", options.split), ("--config", options.config)):
        if not _WORD.fullmatch(value) or value.startswith("."):
            raise UsageError(f"{name}: must be a word of letters, digits, dots, dashes and underscores, got {value!r}")


def _plan(repo: str, options: PushOptions, files: list[HubFile], card: str) -> Iterator[str]:
    visibility = "private" if options.private else "public, unless it exists"
    yield f"would send to {repo} ({visibility}), branch {options.revision or 'main'}, in one commit:"
    for file in files:
        form = " of Arrow, as Parquet" if file.convert else ""
        yield f"  {file.path_in_repo}  {_size(file.source.stat().st_size)}{form}"
    yield f"  {_CARD}  {_size(len(card.encode()))}"
    yield ""
    yield card


def _send(hub: HubRepo, output: Path, layout: HubLayout, manifest: Manifest, files: list[HubFile]) -> Iterator[str]:
    known = hub.files()
    with tempfile.TemporaryDirectory(prefix="batchgen-") as directory:
        scratch = Path(directory)
        for number, file in enumerate(files, 1):
            staged = file.stage(scratch)
            size = staged.stat().st_size
            if hub.stage(file.path_in_repo, staged) and file.convert:
                staged.unlink()
            yield f"{number} of {len(files)}: {file.path_in_repo} ({_size(size)})"
        earlier = hub.read(_CARD, scratch) if _CARD in known else ""
        hub.stage(_CARD, _card(earlier, output, layout, manifest, files).encode())
        obsolete = [
            path for path in known if layout.is_mine(path) and path not in {file.path_in_repo for file in files}
        ]
        name = _written(output).get("name") or manifest.job
        oid, is_new = hub.commit(f"batchgen: {name}, {manifest.counts['rows']} rows", obsolete)
    yield f"{hub.name}: commit {oid}" if is_new else f"{hub.name}: holds all of this already (commit {oid})"


def _card(earlier: str, output: Path, layout: HubLayout, manifest: Manifest, files: list[HubFile]) -> str:
    examples = example_rows(files[:1], _EXAMPLES)
    return write_card(earlier, layout, manifest, _written(output), arrow_schema(files[0]), examples)


def _written(output: Path) -> dict[str, Any]:
    """The job with the names of environment variables, not their values."""
    found: dict[str, Any] = parse_yaml((output / SIDECAR / "job.yaml").read_text(encoding="utf-8"))
    return found


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
