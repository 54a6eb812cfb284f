"""Puts finished files in the place of earlier ones as one act that a kill can interrupt but not spoil.

A record of all moves is written first; whoever finds it carries them out to the end, as often as it takes.
"""

import shutil
from pathlib import Path
from typing import Any

from batchgen.pipeline.publish import move, sync_directory

from .files import read_json, write_json

_RECORD, STAGING = "commit.json", "staging"


def begin_commit(
    sidecar: Path, data: list[str], metadata: list[str], obsolete: list[str], manifest: dict[str, Any]
) -> None:
    """Decides that the files in staging are the output; `data` is moved before `metadata`, by relative name."""
    write_json(sidecar / _RECORD, {"data": data, "metadata": metadata, "obsolete": obsolete, "manifest": manifest})


def is_committing(sidecar: Path) -> bool:
    """Whether a commit has begun and not ended: the final files are between two states."""
    return (sidecar / _RECORD).exists()


def read_commit(sidecar: Path) -> dict[str, Any] | None:
    """The manifest as it will be once the commit that has begun is done; None when there is none."""
    record = read_json(sidecar / _RECORD)
    return None if record is None else record["manifest"]


def finish_commit(output: Path, sidecar: Path) -> bool:
    """Carries out a recorded commit; False when there is none. Afterwards the manifest is the recorded one."""
    record = read_json(sidecar / _RECORD)
    staging = sidecar / STAGING
    if record is None:
        shutil.rmtree(staging, ignore_errors=True)
        return False
    known = {*record["data"], *record["metadata"], *record["obsolete"]}
    for name in record["metadata"]:
        if (staging / name).exists():
            (output / name).unlink(missing_ok=True)
    for directory in _directories(record["data"]):
        _move_directory(staging / directory, output / directory, {Path(name).name for name in known})
    _move(record["data"], staging, output)
    for name in known - {*record["data"], *record["metadata"]}:
        (output / name).unlink(missing_ok=True)
    sync_directory(output)
    _move(record["metadata"], staging, output)
    write_json(sidecar / "manifest.json", record["manifest"])
    (sidecar / _RECORD).unlink()
    shutil.rmtree(staging, ignore_errors=True)
    return True


def _directories(names: list[str]) -> list[str]:
    return sorted({str(Path(name).parent) for name in names} - {"."})


def _move_directory(source: Path, target: Path, known: set[str]) -> None:
    """Moves a directory at once, so that no reader sees some of its files; not when others keep files in it."""
    if not source.is_dir() or (target.exists() and any(path.name not in known for path in target.iterdir())):
        return
    if target.exists():
        target.rename(source.with_name(f"{source.name}.earlier"))
    move(source, target)


def _move(names: list[str], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            move(source / name, target / name)
