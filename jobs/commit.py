"""Puts finished files in the place of earlier ones as one act that a kill can interrupt but not spoil.

A record of all moves is written first; whoever finds it carries them out to the end, as often as it takes.
"""

import shutil
from pathlib import Path
from typing import Any

from .files import read_json, replace, sync_directory, write_json

_RECORD, STAGING = "commit.json", "staging"


def begin_commit(
    sidecar: Path, data: list[str], metadata: list[str], obsolete: list[str], manifest: dict[str, Any]
) -> None:
    """Decides that the files in staging are the output; `data` is moved before `metadata`, by relative name."""
    gone = [name for name in obsolete if name not in {*data, *metadata}]
    write_json(sidecar / _RECORD, {"data": data, "metadata": metadata, "obsolete": gone, "manifest": manifest})


def finish_commit(output: Path, sidecar: Path) -> bool:
    """Carries out a recorded commit; False when there is none. Afterwards the manifest is the recorded one."""
    record = read_json(sidecar / _RECORD)
    staging = sidecar / STAGING
    if record is None:
        shutil.rmtree(staging, ignore_errors=True)
        return False
    for name in record["metadata"]:
        if (staging / name).exists():
            (output / name).unlink(missing_ok=True)
    _move(record["data"], staging, output)
    for name in record["obsolete"]:
        (output / name).unlink(missing_ok=True)
    sync_directory(output)
    _move(record["metadata"], staging, output)
    write_json(sidecar / "manifest.json", record["manifest"])
    (sidecar / _RECORD).unlink()
    shutil.rmtree(staging, ignore_errors=True)
    return True


def _move(names: list[str], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            replace(source / name, target / name)
