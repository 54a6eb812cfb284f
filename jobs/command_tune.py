"""`batchgen tune`: which way quantised products and attention of a model are fastest on this GPU, kept in a file.

Composed from the model's config, the device and the kernels' choices; loads no weights and knows no job file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError


@dataclass(frozen=True)
class TuneOptions:
    """The formats of weights and KV to tune for, and for how long; `out` None: the file that engines read."""

    weights: tuple[str, ...]
    kv: tuple[str, ...]
    device: str
    minutes: float
    out: Path | None


def tune_model(model: str, options: TuneOptions, told: Callable[[str], None]) -> str:
    """Writes the choices and returns the line that says where they are. Raises ModelError, UsageError.

    `told` is given a line for every product.
    """
    import torch

    from batchgen.engine.checkpoint import open_checkpoint
    from batchgen.engine.device import resolve_device
    from batchgen.engine.models import architecture
    from batchgen.engine.tuning import tune_device
    from batchgen.kernels.tuned import kept_records, tuned_file, write_tuned

    device = resolve_device(options.device)
    if device.type != "cuda":
        raise UsageError("--device: name a GPU, kernels of a CPU have no choices to tune")
    path = options.out or tuned_file()
    try:
        kept_records(path)  # before minutes are spent for a file that cannot be added to
    except ValueError as error:
        raise UsageError(f"--out: {error}") from None
    config = open_checkpoint(model).config
    spec = architecture(config).spec(config)
    name = torch.cuda.get_device_name(device)
    found = tune_device(spec, options.weights, options.kv, torch.bfloat16, device, 60 * options.minutes, told)
    write_tuned(path, name, found)
    return f"{path}: {len(found)} choices for {name}, faster than the built-in ones"
