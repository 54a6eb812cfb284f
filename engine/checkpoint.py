"""Opening a checkpoint: where it is, what its config says, which reader has its weights.

Knows the layouts on disk (Hugging Face directory, .gguf file, Hub snapshot); imports no torch, reads no weight.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .spec import ModelError
from .weights.schemes import Scheme, scheme

if TYPE_CHECKING:
    from .weights.load import WeightReader

__all__ = ["Checkpoint", "ModelError", "open_checkpoint", "resolve"]

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_GENERATION_FIELDS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Checkpoint:
    """A model at rest. `config` is in the Hugging Face spelling whatever the format; `reader` opens the weights."""

    def __init__(
        self, path: str, config: dict[str, Any], generation_config: dict[str, Any], reader: "Callable[[], WeightReader]"
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self._open_reader = reader

    @cached_property
    def reader(self) -> "WeightReader":
        return self._open_reader()

    @property
    def eos_ids(self) -> frozenset[int]:
        """The end tokens of config and generation config together."""
        return frozenset([*_ids(self.config), *_ids(self.generation_config)])

    @property
    def dtype(self) -> str | None:
        """The number type the checkpoint says it is in; None when it says nothing."""
        name = self.config.get("dtype") or self.config.get("torch_dtype")
        return None if name is None else str(name).removeprefix("torch.")

    def digest(self) -> str:
        """Identity of the weights, from names, sizes and samples of the files."""
        return self.reader.digest()


def open_checkpoint(path: str, revision: str | None = None) -> Checkpoint:
    """Opens a local directory, a local .gguf file or a Hub id. Raises ModelError naming the path and the cure."""
    place = resolve(path, revision)
    if place.is_dir():
        return _open_directory(place, path, revision)
    if revision is not None:
        raise ModelError(f"model.revision: {revision!r} makes no sense for the file {path}")
    from .weights.gguf_checkpoint import open_gguf

    return open_gguf(place)


def resolve(path: str, revision: str | None = None, patterns: Iterable[str] = _SMALL_FILES) -> Path:
    """The local directory or .gguf file of a model; a Hub id is fetched (only files that fit `patterns`)."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        if local.suffix != ".gguf":
            raise ModelError(f"model.path: {path} is a file but no .gguf; give the model's directory")
        return local
    if not _HUB_ID.fullmatch(path) or path.endswith(".gguf"):
        raise ModelError(f"model.path: {path} does not exist; give a model directory, a .gguf file or a Hub id")
    return _snapshot(path, revision, list(patterns))


def _snapshot(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model.path: {name} is no local path and could not be had from the Hub ({reason}); "
            "check name, revision and network, or give a local directory"
        ) from None


def _open_directory(directory: Path, path: str, revision: str | None) -> Checkpoint:
    if not (directory / "config.json").is_file():
        raise ModelError(f"model.path: {directory} has no config.json; give a model directory or a .gguf file")
    config = _json(directory / "config.json")
    if (directory / "quantize_config.json").is_file() and "quantization_config" not in config:
        config["quantization_config"] = _json(directory / "quantize_config.json")
    if (directory / "generation_config.json").is_file():
        generation = _json(directory / "generation_config.json")
    else:
        generation = {name: config[name] for name in _GENERATION_FIELDS if name in config}
    is_hub = not Path(path).expanduser().is_dir()
    return Checkpoint(
        path, config, generation, lambda: _reader(_with_weights(path, revision) if is_hub else directory, config)
    )


def _with_weights(name: str, revision: str | None) -> Path:
    """The snapshot with its weights: safetensors, or the pickled files where there are none."""
    directory = _snapshot(name, revision, [*_SMALL_FILES, "model*.safetensors"])
    if not any(directory.glob("model*.safetensors")):
        directory = _snapshot(name, revision, [*_SMALL_FILES, "pytorch_model*.bin"])
    return directory


def _reader(directory: Path, config: dict[str, Any]) -> "WeightReader":
    """The reader of the first weight file found, in the order of the table below."""
    for name, open_reader in _READERS.items():
        if (directory / name).is_file():
            reader, packing = open_reader(directory / name), scheme(config)
            return reader if packing is None else _packed(reader, packing, directory)
    raise ModelError(
        f"model.path: {directory} has none of {', '.join(_READERS)}; download the weights, or give a .gguf file"
    )


def _packed(reader: "WeightReader", packing: Scheme, directory: Path) -> "WeightReader":
    from .weights.packed_checkpoint import unpacked_reader
    from .weights.safetensors import SafetensorsReader

    if not isinstance(reader, SafetensorsReader):
        raise ModelError(f"model.path: {directory} has {packing.method} weights in a pickle; convert it to safetensors")
    return unpacked_reader(reader, packing)


def _safetensors(path: Path) -> "WeightReader":
    from .weights.safetensors import SafetensorsReader, shards

    return SafetensorsReader(shards(path) if path.suffix == ".json" else [path])


def _pickled(path: Path) -> "WeightReader":
    from .weights.pickled import PickledReader
    from .weights.safetensors import shards

    return PickledReader(shards(path) if path.suffix == ".json" else [path])


_READERS: "dict[str, Callable[[Path], WeightReader]]" = {
    "model.safetensors": _safetensors,
    "model.safetensors.index.json": _safetensors,
    "pytorch_model.bin": _pickled,
    "pytorch_model.bin.index.json": _pickled,
}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a mapping")
    return value


def _ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    return [] if value is None else list(value) if isinstance(value, list) else [value]
