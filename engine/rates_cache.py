"""Where a user's measured rates are kept: one file, an entry for each device, shape of model and set of versions.

Knows how entries are named and stored; loads no torch.
"""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .processor import Place
from .rates import Rates
from .sharing import BUILT_IN, Sharing
from .spec import ModelSpec

_LAYOUT = 4  # of an entry, and of the way it is measured
_ATTEMPT = "seconds_too_few"


def cache_file() -> Path:
    """The file of this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "batchgen" / "calibration.json"


def entry_name(spec: ModelSpec, dtype: str, place: Place) -> str:
    """The key of an entry: what decides the rates."""
    shape = sha256(json.dumps(asdict(spec), sort_keys=True, default=str).encode()).hexdigest()[:16]
    return f"{_LAYOUT} | {place.kind}: {place.name} | {dtype} {spec.model_type} {shape} | {_versions()}"


def load_rates(path: Path, name: str) -> Rates | None:
    """The entry, if there is one that this version reads."""
    with suppress(KeyError, ValueError, TypeError, AttributeError, IndexError):
        return Rates.from_record(_entries(path)[name])
    return None


def known_sharing(spec: ModelSpec, dtype: str, place: Place, kv_cache: str) -> Sharing:
    """What shared keys cost there in this KV format: measured for an earlier job or this one, else built in."""
    found = load_rates(cache_file(), entry_name(spec, dtype, place))
    return BUILT_IN[place.kind] if found is None else found.sharing[kv_cache]


def load_attempt(path: Path, name: str) -> float:
    """The seconds in which nothing could be measured for the entry; 0 where it was never tried."""
    with suppress(KeyError, ValueError, TypeError):
        seconds = float(_entries(path)[name][_ATTEMPT])
        return seconds if 0 < seconds < math.inf else 0.0
    return 0.0


def keep_rates(path: Path, name: str, rates: Rates) -> None:
    """Adds the entry; a home that cannot be written costs a measurement next time."""
    _keep(path, name, rates.to_record())


def keep_attempt(path: Path, name: str, seconds: float) -> None:
    """Adds that so many seconds do not suffice to measure the entry."""
    _keep(path, name, {_ATTEMPT: seconds})


def _keep(path: Path, name: str, entry: Mapping[str, object]) -> None:
    known = _entries(path)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_text(json.dumps({**known, name: entry}), encoding="utf-8")
        aside.replace(path)


def _entries(path: Path) -> dict[str, Any]:
    """All that is kept; nothing where the file cannot be read or holds something else."""
    with suppress(OSError, ValueError, RecursionError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        return kept if isinstance(kept, dict) else {}
    return {}


def _versions() -> str:
    found = []
    for package in ("batchgen", "torch"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
