"""Checkpoints in safetensors, in one file or in shards: names, shapes and tensors, one shard after the other."""

import json
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..spec import ModelError
from .mapped import MappedFile, digest_files
from .tensors import DenseTensor, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

_PACKED = {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8"}
_PACKED |= {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "uint8"}  # the latter as its exponent bits
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_BYTES |= dict.fromkeys(("I8", "U8", "F8_E4M3", "F8_E8M0"), 1)
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the beginning of the file
    length: int


class SafetensorsReader:
    """The tensors of one checkpoint. Raises ModelError for a damaged file or a number type that is not plain."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._entries: dict[Path, dict[str, _Entry]] = {}
        seen: set[str] = set()
        for path in paths:
            self._entries[path] = _header(path)
            for name in self._entries[path].keys() & seen:
                raise ModelError(f"{path}: tensor {name} is in another shard too")
            seen.update(self._entries[path])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for entries in self._entries.values() for name, entry in entries.items()}

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]:
        """The wanted tensors in the order of the files; each is valid until the next is asked for."""
        for path, entries in self._entries.items():
            file = MappedFile(path)
            for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
                if name in wanted:
                    yield name, _tensor(file, name, entry)
                    file.release(entry.start, entry.length)

    def tensor(self, name: str) -> "Tensor":
        """A tensor of any plain type, copied out of the file. Raises KeyError."""
        path = next(path for path, entries in self._entries.items() if name in entries)
        entry = self._entries[path][name]
        with path.open("rb") as file:
            file.seek(entry.start)
            return _plain(path, name, entry, bytearray(file.read(entry.length)))

    def digest(self) -> str:
        places = {path: [entry.start for entry in entries.values()] for path, entries in self._entries.items()}
        return digest_files(places)


def shards(index: Path) -> list[Path]:
    """The files an index names, each once. Raises ModelError for one that is not there, and for a damaged index."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        present = [(index.parent / name).is_file() for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index}: not an index of shards, or damaged; download the model again") from None
    for name, is_there in zip(names, present, strict=True):
        if not is_there:
            raise ModelError(f"{index}: names the shard {name}, which is not there; download the model again")
    return [index.parent / name for name in names]


def _header(path: Path) -> dict[str, _Entry]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MAX_HEADER else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(info, 8 + length) for name, info in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path}: not a safetensors file, or damaged; download it again") from None
    end = max((entry.start + entry.length for entry in entries.values()), default=0)
    if end > path.stat().st_size:
        raise ModelError(f"{path}: cut short ({path.stat().st_size} bytes of {end}); download it again")
    return entries


def _entry(info: dict[str, Any], data: int) -> _Entry:
    """Raises ValueError, TypeError or KeyError where the numbers of an entry cannot be."""
    dtype, shape, (first, last) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    whole = isinstance(dtype, str) and all(type(number) is int for number in (*shape, first, last))
    if not whole or not 0 <= first <= last or min(shape, default=0) < 0:
        raise ValueError
    if dtype in _BYTES and last - first != math.prod(shape) * _BYTES[dtype]:
        raise ValueError
    return _Entry(dtype, shape, data + first, last - first)


def _plain(path: Path, name: str, entry: _Entry, data: bytearray) -> "Tensor":
    import torch

    known = _DTYPES | _PACKED
    if entry.dtype not in known:
        raise ModelError(f"{path}: tensor {name} has the number type {entry.dtype}, which is not supported")
    return torch.frombuffer(data, dtype=getattr(torch, known[entry.dtype])).view(entry.shape)


def _tensor(file: MappedFile, name: str, entry: _Entry) -> DenseTensor:
    import torch

    if entry.dtype not in _DTYPES:
        raise ModelError(f"{file.path}: tensor {name} has the number type {entry.dtype}, which is not supported")
    flat = torch.from_numpy(file.view(entry.start, entry.length)).view(getattr(torch, _DTYPES[entry.dtype]))
    return DenseTensor(flat.view(entry.shape))
