"""`batchgen quantize`: a model's linears in few bits, as a checkpoint directory that appears whole or not at all.

Knows where the output lies and what is told at the end; what is written is decided in the engine.
"""

from collections.abc import Mapping
from pathlib import Path

from .directory import new_directory

_WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")


def quantize_model(model: str, out: Path, weights: str, group: int | None, revision: str | None) -> str:
    """Writes the checkpoint and returns the line that says what it came to. Raises ModelError, UsageError."""
    from batchgen.engine.checkpoint import open_checkpoint, resolve
    from batchgen.engine.machine import use_granted_cores
    from batchgen.engine.rewrite import rewrite

    with new_directory(out) as aside:
        use_granted_cores()
        done = rewrite(open_checkpoint(model, revision), aside, weights, group, revision)
    before = _size_of(resolve(model, revision))
    scales = f"groups of {done.group}" if weights == "int4" else "a scale per output"
    return (
        f"{out}: {before / 1e6:.1f} MB -> {done.num_bytes / 1e6:.1f} MB, {weights} with {scales}; "
        f"error added, relative (RMS): {_told(done.errors)}"
    )


def _told(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {error:.2%}" for kind, error in errors.items()) or "none, the codes were kept"


def _size_of(place: Path) -> int:
    if place.is_file():
        return place.stat().st_size
    found = next((files for pattern in _WEIGHT_FILES if (files := list(place.glob(pattern)))), [])
    return sum(path.stat().st_size for path in found)
