"""Puts finished files in the place of earlier ones as one act that a kill can interrupt but not spoil.

A record of all moves is written first; whoever finds it carries them out to the end, as often as it takes.
"""

from pathlib import PurePosixPath
from typing import Any

from batchgen.pipeline.place import AnyPath
from batchgen.pipeline.storage import move, remove_tree, storage_of, sync_directory

from .files import read_json, write_json

_RECORD, STAGING = "commit.json", "staging"


def begin_commit(
    sidecar: AnyPath, data: list[str], metadata: list[str], obsolete: list[str], manifest: dict[str, Any]
) -> None:
    """Decides that the files in staging are the output; `data` is moved before `metadata`, by relative name."""
    write_json(sidecar / _RECORD, {"data": data, "metadata": metadata, "obsolete": obsolete, "manifest": manifest})


def is_committing(sidecar: AnyPath) -> bool:
    """Whether a commit has begun and not ended: the final files are between two states."""
    return (sidecar / _RECORD).exists()


def read_commit(sidecar: AnyPath) -> dict[str, Any] | None:
    """The manifest as it will be once the commit that has begun is done; None when there is none."""
    record = read_json(sidecar / _RECORD)
    return None if record is None else record["manifest"]


def finish_commit(output: AnyPath, sidecar: AnyPath) -> bool:
    """Carries out a recorded commit; False when there is none. Afterwards the manifest is the recorded one."""
    record = read_json(sidecar / _RECORD)
    staging = sidecar / STAGING
    if record is None:
        remove_tree(staging)
        return False
    known = {*record["data"], *record["metadata"], *record["obsolete"]}
    for name in record["metadata"]:
        if (staging / name).exists():
            (output / name).unlink(missing_ok=True)
    names = {PurePosixPath(name).name for name in known}
    for directory in _directories(record["data"]):
        storage_of(output).move_directory(staging / directory, output / directory, names)
    _move(record["data"], staging, output)
    for name in known - {*record["data"], *record["metadata"]}:
        (output / name).unlink(missing_ok=True)
    sync_directory(output)
    _move(record["metadata"], staging, output)
    write_json(sidecar / "manifest.json", record["manifest"])
    (sidecar / _RECORD).unlink()
    remove_tree(staging)
    return True


def _directories(names: list[str]) -> list[str]:
    return sorted({str(PurePosixPath(name).parent) for name in names} - {"."})


def _move(names: list[str], source: AnyPath, target: AnyPath) -> None:
    for name in names:
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            move(source / name, target / name)
