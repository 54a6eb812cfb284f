"""Checkpoints in the old pickle format, read with the weights-only loader: no code in them ever runs."""

import pickle
import zipfile
from collections.abc import Container, Iterator
from pathlib import Path

from ..spec import ModelError
from .mapped import digest_files
from .tensors import DenseTensor, TensorSource


class PickledReader:
    """The tensors of `pytorch_model*.bin` files, mapped and not copied."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: source.shape for name, source in self._all()}

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]:
        return ((name, source) for name, source in self._all() if name in wanted)

    def digest(self) -> str:
        return digest_files({path: _starts(path) for path in self.paths})

    def _all(self) -> Iterator[tuple[str, TensorSource]]:
        import torch

        for path in self.paths:
            for name, value in _load(path).items():
                if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                    raise ModelError(f"{path}: entry {name} is no tensor of floating-point numbers")
                yield name, DenseTensor(value)


def _load(path: Path) -> dict[str, object]:
    import torch

    try:
        loaded: dict[str, object] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path}: cannot be read safely ({reason}); convert the model to safetensors") from None
    return loaded


def _starts(path: Path) -> list[int]:
    """Where the entries of a file begin; nothing of the kind before archives, which is one stream."""
    if not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return [entry.header_offset for entry in archive.infolist()]
    except zipfile.BadZipFile as error:
        raise ModelError(f"{path}: damaged ({error}); download it again") from None
