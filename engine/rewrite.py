"""A checkpoint of any format rewritten with its linears in few bits, as a directory that transformers loads too.

Streams tensor by tensor: what a linear becomes is decided in `weights/compress.py`, where files lie by the caller.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint import Checkpoint, resolve
from .models import architecture
from .models.names import Place, WeightPlan
from .spec import ModelError
from .tokenizer import load_tokenizer
from .weights.compress import Compression, compression
from .weights.load import EMBEDDING, HEAD, checked_places
from .weights.quantise import RoundingError
from .weights.safetensors_writer import SafetensorsWriter
from .weights.tensors import DenseTensor, TensorSource

SHARD_BYTES = 4 * 10**9
_REPLACED = {"config.json", "quantize_config.json"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_PIECES = 4  # of a linear


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What came of it: bytes, inputs of a scale (0: all of them), error relative to the weights by kind of linear."""

    num_bytes: int
    group: int
    errors: Mapping[str, float]


def rewrite(
    checkpoint: Checkpoint,
    directory: Path,
    weights: str,
    group: int | None = None,
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Rewritten:
    """Writes the checkpoint into the empty `directory`, its linears but the head as `weights` (int4, int8 or fp8).

    Raises ModelError naming the config field or tensor that is refused.
    """
    family = architecture(checkpoint.config)
    spec = family.spec(checkpoint.config)
    plan = family.weights(spec)
    places = checked_places(checkpoint.reader, plan, spec.tied)
    linears = {name: place for name, place in places.items() if _is_linear(name, place, plan)}
    chosen = compression(weights, group, {place.shape[1] for place in linears.values()}, _dtype(checkpoint))
    writer = SafetensorsWriter(directory, shard_bytes, _MOST_PIECES * len(places))
    errors = _write_tensors(checkpoint, places, linears, chosen, writer)
    _write_config(checkpoint, directory, chosen, tied=HEAD not in places)
    _write_tokenizer(checkpoint, directory, revision)
    return Rewritten(writer.total, chosen.group, errors.relative())


def _is_linear(name: str, place: Place, plan: WeightPlan) -> bool:
    return place.part in plan.linears and not place.bias and name not in (HEAD, EMBEDDING)


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Of scales and of what is not packed, where the source is packed: the checkpoint's own, or bfloat16."""
    return _DTYPES.get(checkpoint.dtype or "", torch.bfloat16)


def _write_tensors(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    linears: Mapping[str, Place],
    chosen: Compression,
    writer: SafetensorsWriter,
) -> RoundingError:
    errors = RoundingError()
    for name, source in checkpoint.reader.tensors(places):
        if name in linears:
            kind = linears[name].part.rpartition(".")[2]
            try:
                pieces = chosen.pieces(source, kind, errors)
            except ValueError as error:
                raise ModelError(f"{name}: {error}") from error
            for piece, tensor in pieces.items():
                writer.add(f"{name.removesuffix('.weight')}.{piece}", tensor)
        else:
            writer.add(name, _plain(source, chosen.dtype))
    writer.close()
    return errors


def _plain(source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
    return source.values if isinstance(source, DenseTensor) else source.dequantise(dtype)


def _write_config(checkpoint: Checkpoint, directory: Path, chosen: Compression, tied: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = {key: value for key, value in checkpoint.config.items() if key != "compression_config"}
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if name is not None:
        config.setdefault("architectures", [name])
    if checkpoint.dtype is None:
        config["dtype"] = str(chosen.dtype).removeprefix("torch.")
    config["tie_word_embeddings"] = tied
    config["quantization_config"] = chosen.settings(["lm_head"])
    _write_json(directory / "config.json", config)


def _write_tokenizer(checkpoint: Checkpoint, directory: Path, revision: str | None) -> None:
    """The small files of a directory as they are; for a .gguf file what they would be."""
    place = resolve(checkpoint.path, revision)
    if place.is_dir():
        for pattern in ("*.json", "*.jinja", "*.txt", "*.model"):
            for path in place.glob(pattern):
                if path.name not in _REPLACED and not path.name.endswith(".index.json"):
                    shutil.copyfile(path, directory / path.name)
        return
    _write_gguf_tokenizer(checkpoint, directory)


def _write_gguf_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = load_tokenizer(checkpoint.path)
    build: Any = PreTrainedTokenizerFast
    fast = build(tokenizer_object=tokenizer.backend, **tokenizer.special_tokens)
    fast.chat_template = tokenizer.chat_template
    fast.save_pretrained(directory)
    _write_json(directory / "generation_config.json", {"eos_token_id": sorted(checkpoint.eos_ids | tokenizer.eos_ids)})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
