"""The container format GGUF: keys, tensor infos and where the bytes of a tensor lie.

Knows nothing of what keys and tensors mean; imports no torch.
"""

import functools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import ModelError
from .blocks import BLOCK_TYPES, BlockType
from .mapped import MappedFile

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` has outputs first (the file has it reversed)."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    start: int  # from the beginning of the file

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.kind.row_bytes(self.shape[-1])

    @property
    def length(self) -> int:
        return self.rows * self.row_bytes


class GGUFFile:
    """An open file: `keys` and `tensors` by name. Raises ModelError for what is damaged or not understood."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self.keys, self.tensors = self._header()
        self._check_extent()

    def raw(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """[rows, bytes per row], not copied."""
        return self._file.view(tensor.start, tensor.length).reshape(tensor.rows, tensor.row_bytes)

    def release(self, tensor: TensorInfo) -> None:
        self._file.release(tensor.start, tensor.length)

    def _header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        try:
            return self._parse(_Cursor(self._file))
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, RecursionError):
            raise ModelError(f"{self.path}: the GGUF header is damaged; download the file again") from None

    def _parse(self, cursor: "_Cursor") -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if cursor.take(4) != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file")
        version, num_tensors, num_keys = (cursor.number("<I"), cursor.number("<Q"), cursor.number("<Q"))
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (there are: 2, 3)")
        keys = {}
        for _ in range(num_keys):
            name = cursor.string()
            keys[name] = self._value(cursor, name, cursor.number("<I"))
        self._refuse_split(keys)
        infos = [self._info(cursor) for _ in range(num_tensors)]
        alignment = self._count(keys, "general.alignment", _DEFAULT_ALIGNMENT, least=1)
        data = -(-cursor.position // alignment) * alignment
        return keys, {name: TensorInfo(name, kind, shape, data + start) for name, kind, shape, start in infos}

    def _value(self, cursor: "_Cursor", name: str, kind: int) -> Any:
        if kind == _STRING:
            return cursor.string()
        if kind == _ARRAY:
            inner, count = cursor.number("<I"), cursor.number("<Q")
            return self._array(cursor, name, inner, count)
        return cursor.number(self._number_format(name, kind))

    def _array(self, cursor: "_Cursor", name: str, kind: int, count: int) -> Any:
        if kind == _STRING:
            return cursor.strings(count)
        if kind == _ARRAY:
            return [self._value(cursor, name, kind) for _ in range(count)]
        return cursor.numbers(self._number_format(name, kind), count)

    def _number_format(self, name: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise ModelError(f"{self.path}: key {name} has the unknown value type {kind}")
        return _NUMBERS[kind]

    def _refuse_split(self, keys: Mapping[str, Any]) -> None:
        count = self._count(keys, "split.count", 1, least=0)
        if count > 1:
            raise ModelError(f"{self.path}: is one of {count} split files (split.count); merge them first")

    def _count(self, keys: Mapping[str, Any], name: str, default: int, least: int) -> int:
        value = keys.get(name, default)
        if type(value) is not int or value < least:
            raise ModelError(
                f"{self.path}: key {name} must be a whole number from {least} on, got {value!r:.100}; "
                "download the file again"
            )
        return value

    def _info(self, cursor: "_Cursor") -> tuple[str, BlockType, tuple[int, ...], int]:
        name = cursor.string()
        shape = tuple(cursor.number("<Q") for _ in range(cursor.number("<I")))[::-1] or (1,)
        number, start = cursor.number("<I"), cursor.number("<Q")
        if number not in BLOCK_TYPES:
            known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
            raise ModelError(
                f"{self.path}: tensor {name} has GGUF type {number}, which is not supported (there are: {known})"
            )
        kind = BLOCK_TYPES[number]
        if shape[-1] % kind.size:
            raise ModelError(
                f"{self.path}: tensor {name} has rows of {shape[-1]}, no multiple of {kind.size} ({kind.name})"
            )
        return name, kind, shape, start

    def _check_extent(self) -> None:
        for tensor in self.tensors.values():
            if tensor.start + tensor.length > self._file.size:
                raise ModelError(f"{self.path}: cut short inside tensor {tensor.name}; download the file again")


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.position = 0

    def take(self, length: int) -> bytes:
        data = self._file.read(self.position, length)
        if len(data) != length:
            raise struct.error("end of file")
        self.position += length
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def numbers(self, form: str, count: int) -> list[Any]:
        dtype = np.dtype(form)
        values: list[Any] = np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        return values

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """Many strings at once: the vocabulary of a tokenizer."""
        return list(map(self._quick_string(), range(count)))

    def _quick_string(self) -> Callable[[int], str]:
        view = self._file.view(0, self._file.size).data
        unpack = struct.Struct("<Q").unpack_from

        def read(_: int) -> str:
            start = self.position + 8
            self.position = start + unpack(view, self.position)[0]
            return str(view[start : self.position], "utf-8")

        return read


@functools.lru_cache(maxsize=2)
def _open(path: Path, size: int, mtime_ns: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf_file(path: Path) -> GGUFFile:
    """The open file; config, tokenizer and weights of one model share it."""
    status = path.stat()
    return _open(path.resolve(), status.st_size, status.st_mtime_ns)
