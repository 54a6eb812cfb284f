"""Writes a checkpoint in safetensors, in shards of a bounded size; each tensor goes straight to its file.

Knows the layout of the files and their index; not what the tensors are.
"""

import json
import os
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

_ENTRY_BYTES = 300  # of the header, for one tensor; names are shorter than 150 characters
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


class SafetensorsWriter:
    """Shards of at most `shard_bytes`, one tensor at least. `most_tensors`: no more will come, the header has room."""

    def __init__(self, directory: Path, shard_bytes: int, most_tensors: int) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._header_bytes = -(-(2 + most_tensors * _ENTRY_BYTES + 100) // 8) * 8
        self._file: IO[bytes] | None = None
        self._header: dict[str, object] = {}
        self._written = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor. Raises OSError when the disk is full."""
        if self._file is not None and self._written + tensor.nbytes > self._shard_bytes:
            self._finish_shard()
        file = self._file or self._open_shard()
        start = self._written
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self._written += tensor.nbytes
        self.total += tensor.nbytes
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, self._written],
        }
        self._shards[-1][1].append(name)

    def close(self) -> None:
        """Finishes the last shard; names the files, and writes an index when there are several."""
        if self._file is not None:
            self._finish_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            final = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
            (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _open_shard(self) -> IO[bytes]:
        path = self._directory / f"shard-{len(self._shards)}"
        self._file = path.open("wb")
        self._file.write(bytes(8 + self._header_bytes))
        self._header, self._written = {"__metadata__": {"format": "pt"}}, 0
        self._shards.append((path, []))
        return self._file

    def _finish_shard(self) -> None:
        file, self._file = self._file, None
        if file is None:
            raise ValueError("no shard is open")
        header = json.dumps(self._header, separators=(",", ":")).encode().ljust(self._header_bytes)
        if len(header) > self._header_bytes:
            raise ValueError(f"the header takes {len(header)} bytes, there is room for {self._header_bytes}")
        with file:
            file.seek(0)
            file.write(len(header).to_bytes(8, "little") + header)
            file.flush()
            os.fsync(file.fileno())
