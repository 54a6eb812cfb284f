"""Checkpoints with packed linears, packed by hand number by number: an oracle that shares no code with the readers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: torch.Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[A, B] -> int32 [A, B * bits / 32]: number `order[i]` of every word at bit i * bits."""
    count = 32 // bits
    order = order or tuple(range(count))
    rows = []
    for row in numbers.tolist():
        packed = [sum(row[c + order[i]] << (bits * i) for i in range(count)) for c in range(0, len(row), count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def repack_folder(
    folder: Path,
    settings: dict[str, Any],
    pack: Callable[[str, int, int], tuple[Tensors, torch.Tensor]],
    plain: tuple[str, ...] = (),
) -> Tensors:
    """Replaces the projections of a checkpoint (but those named in `plain`) by packed random ones.

    `pack(module, outputs, inputs)` gives the pieces and the values they stand for; returns all values of the model.
    """
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight") and not any(p in name for p in plain)]:
        module = name.removesuffix(".weight")
        pieces, values[name] = pack(module, *tensors.pop(name).shape)
        tensors |= {f"{module}.{piece}": tensor.contiguous() for piece, tensor in pieces.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return values
