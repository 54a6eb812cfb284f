"""The file of tuned choices: for each device and shape of product the way that was fastest there. Users may ship it.

    {"version": 2, "devices": {NAME: [
      {"table": "wide", "codes": "int4", "group": 128, "tokens": 64, "outputs": 4096, "inputs": 4096,
       "microseconds": 12.3,
       "choice": {"path": "split", "tokens": 64, "outputs": 128, "warps": 8, "stages": 3, "splits": 1}}, ..]}}

NAME is the device's, as the driver tells it. `table` to `inputs` are the `Key` of `grouped.choice`, `choice` its
`Choice`. Attention has records of its own, a `TileKey` and a `Tile` of `attention.gpu_choice`:

      {"keys": "bfloat16", "values": "bfloat16", "dtype": "bfloat16", "head_dim": 128, "wide": false,
       "microseconds": 45.6, "tile": {"keys": 64, "num_warps": 4, "num_stages": 3}}

What is not in the file goes by what is built in.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, get_args

from .attention.gpu_choice import Tile, TileKey
from .grouped.choice import TILE_TOKENS, Choice, Key
from .grouped.choice import Path as Way
from .launch import power_of_two

VERSION = 2
VARIABLE = "BATCHGEN_TUNED"
AnyKey: TypeAlias = Key | TileKey
AnyChoice: TypeAlias = Choice | Tile


def tuned_file() -> Path:
    """Where choices are read from, and written to when no place is named: $BATCHGEN_TUNED, else in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or Path(cache) / "batchgen" / "tuned.json")


def read_tuned(path: Path, device: str) -> dict[AnyKey, AnyChoice]:
    """The choices for a device by its name; none where there is no file. Raises ValueError naming the file."""
    if not path.is_file() and os.environ.get(VARIABLE):
        raise ValueError(f"{VARIABLE}: there is no file {path}; unset it, or write one with batchgen tune")
    return dict(map(_entry, kept_records(path).get(device, [])))


def kept_records(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What a file has of every device; nothing where there is no file. Raises ValueError naming the file."""
    try:
        devices = _devices(path) if path.is_file() else {}
        for record in chain.from_iterable(devices.values()):
            _entry(record)
        return devices
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: no file of tuned choices of version {VERSION} ({type(error).__name__}: {error}); "
            "delete it, or write one with batchgen tune"
        ) from None


def write_tuned(path: Path, device: str, found: Mapping[AnyKey, tuple[AnyChoice, float]]) -> None:
    """Adds choices and their seconds, in the place of older ones of the same keys; other devices' stay as they are.

    Raises ValueError, and leaves the file alone, where `read_tuned` could not read it.
    """
    devices = kept_records(path)
    kept = [record for record in devices.get(device, []) if _entry(record)[0] not in found]
    devices[device] = kept + [_record(key, *value) for key, value in sorted(found.items(), key=repr)]
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"version": VERSION, "devices": devices}, indent=1), encoding="utf-8")
    aside.replace(path)


def _devices(path: Path) -> dict[str, list[dict[str, Any]]]:
    whole = json.loads(path.read_text(encoding="utf-8"))
    if whole["version"] != VERSION:
        raise ValueError(f"it has version {whole['version']!r}")
    devices: dict[str, list[dict[str, Any]]] = whole["devices"]
    return devices


def _entry(record: Mapping[str, Any]) -> tuple[AnyKey, AnyChoice]:
    return _tile_entry(record) if "tile" in record else _product_entry(record)


def _product_entry(record: Mapping[str, Any]) -> tuple[Key, Choice]:
    choice = Choice(**record["choice"])
    numbers = [getattr(choice, one.name) for one in fields(choice) if one.name != "path"]
    known = choice.path in get_args(Way) and choice.tokens in TILE_TOKENS
    known = known and _is_power_of_two(choice.outputs) and _is_power_of_two(choice.warps)
    if not known or any(not isinstance(one, int) or one < 1 for one in numbers):
        raise ValueError(f"{record['choice']} is no choice")
    sizes = (int(record[name]) for name in Key._fields[2:])
    return Key(str(record["table"]), str(record["codes"]), *sizes), choice


def _tile_entry(record: Mapping[str, Any]) -> tuple[TileKey, Tile]:
    tile = Tile(**record["tile"])
    if not (_is_power_of_two(tile.keys) and _is_power_of_two(tile.num_warps) and tile.num_stages in range(1, 9)):
        raise ValueError(f"{record['tile']} is no tile")
    keys, values, dtype = (str(record[name]) for name in TileKey._fields[:3])
    return TileKey(keys, values, dtype, int(record["head_dim"]), bool(record["wide"])), tile


def _is_power_of_two(number: object) -> bool:
    return isinstance(number, int) and number > 0 and power_of_two(number) == number


def _record(key: AnyKey, choice: AnyChoice, seconds: float) -> dict[str, Any]:
    kind = "tile" if isinstance(choice, Tile) else "choice"
    return {**key._asdict(), kind: asdict(choice), "microseconds": round(seconds * 1e6, 2)}
