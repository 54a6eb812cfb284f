"""Medusa heads from a checkpoint, run over the hidden states that a step of the target leaves behind.

Knows the files and tensor names of public Medusa checkpoints; when drafts are made, and how long, is not known here.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from ...kernels import Kernels
from ...kernels.sampling import Filters
from ..batch import Batch
from ..checkpoint import ModelError, resolve
from ..config import HEADS_FILES
from ..decoder import Decoder, LinearHead
from ..linear import DenseLinear
from ..link import Link
from ..runner import draw_in_parts
from ..sampling import Sampler
from ..sequence import Drawn, Feed, Sequence, Step
from ..weights.load import WeightReader
from ..weights.pickled import PickledReader
from ..weights.safetensors import SafetensorsReader

SAFETENSORS, PICKLED = HEADS_FILES
CONFIG = "config.json"
NUM_HEADS, NUM_LAYERS = "medusa_num_heads", "medusa_num_layers"

_READERS: dict[str, Callable[[list[Path]], WeightReader]] = {SAFETENSORS: SafetensorsReader, PICKLED: PickledReader}
_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Residual blocks x + silu(block(x)), then the output projection: a Medusa head (Cai et al. 2024)."""

    blocks: tuple[Callable[[Tensor], Tensor], ...]
    output: LinearHead

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H], the target's final-normed states -> [R, V] float32."""
        return self.output.logits(self._states(hidden))

    def draw(self, hidden: Tensor, vocabulary: int, filters: Filters) -> tuple[Tensor, Tensor]:
        return self.output.draw(self._states(hidden), vocabulary, filters)

    def _states(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + silu(block(hidden))
        return hidden


def load_heads(path: str, target: Decoder, kernels: Kernels) -> tuple[MedusaHead, ...]:
    """The heads in a directory or Hub repository, in the target's compute dtype.

    `medusa_lm_head.safetensors` or `.pt` holds `K.L.linear.weight` [H, H] and, where it has one, `K.L.linear.bias` [H]
    for block L of head K, and behind N blocks `K.N.weight` [V, H], the output projection; a head without one shares
    the target's. Of `config.json`, where there is one, `medusa_num_heads` bounds how many heads are used. Raises
    ModelError naming the file and the tensor.
    """
    directory = resolve(path, patterns=[CONFIG, *_READERS])
    file = next((directory / name for name in _READERS if (directory / name).is_file()), None)
    if file is None:
        raise ModelError(f"{directory} has none of {', '.join(_READERS)}; name a Medusa checkpoint")
    tensors = _tensors(file, target)
    wanted = _num_heads(directory, file, 1 + max(head for head, _, _ in tensors))
    return tuple(_head(index, tensors, file, target, kernels) for index in range(wanted))


def _tensors(file: Path, target: Decoder) -> dict[tuple[int, int, str], Tensor]:
    """(head, layer, kind) -> values; every name is known and every shape fits."""
    reader = _READERS[file.name]([file])
    hidden, vocabulary = target.spec.hidden_size, target.spec.vocab_size
    shapes = {"linear.weight": (hidden, hidden), "linear.bias": (hidden,), "weight": (vocabulary, hidden)}
    found = {}
    for name, source in reader.tensors(reader.shapes()):
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{file}: tensor {name} is none of a Medusa head")
        if source.shape != shapes[match[3]]:
            raise ModelError(
                f"{file}: tensor {name} is {list(source.shape)}, the model needs "
                f"{list(shapes[match[3]])}; use heads that were trained for this model"
            )
        found[int(match[1]), int(match[2]), match[3]] = source.dequantise(target.dtype).to(target.device, copy=True)
    if not found:
        raise ModelError(f"{file} holds no tensor; name a Medusa checkpoint")
    return found


def _num_heads(directory: Path, file: Path, stored: int) -> int:
    path = directory / CONFIG
    if not path.is_file():
        return stored
    try:
        wanted = json.loads(path.read_text(encoding="utf-8")).get(NUM_HEADS, stored)
    except (ValueError, AttributeError):
        raise ModelError(f"{path}: must hold a JSON mapping") from None
    if not isinstance(wanted, int) or not 1 <= wanted <= stored:
        raise ModelError(f"{path}: {NUM_HEADS} is {wanted!r}, but {file.name} has {stored} heads")
    return wanted


def _head(
    index: int, tensors: Mapping[tuple[int, int, str], Tensor], file: Path, target: Decoder, kernels: Kernels
) -> MedusaHead:
    """The tensors of one head put together; all of them are used, and no layer between them is missing."""
    own = {(layer, kind): values for (head, layer, kind), values in tensors.items() if head == index}
    num_blocks = sum(kind == "linear.weight" for _, kind in own)
    output = own.get((num_blocks, "weight"))
    known = {(layer, kind) for layer in range(num_blocks) for kind in ("linear.weight", "linear.bias")}
    known.add((num_blocks, "weight"))
    missing = [layer for layer in range(num_blocks) if (layer, "linear.weight") not in own]
    if missing or own.keys() - known or not own:
        raise ModelError(f"{file}: the tensors of head {index} leave a gap; download it again")
    layers = [(own[layer, "linear.weight"], own.get((layer, "linear.bias"))) for layer in range(num_blocks)]
    blocks = tuple(DenseLinear(kernels, weight, bias) for weight, bias in layers)
    return MedusaHead(blocks, target.head() if output is None else LinearHead(DenseLinear(kernels, output, None)))


class LastStates:
    """Watches the target's runner: the hidden states that the last step drew from, and where they stand."""

    sees_all = False

    def __init__(self) -> None:
        self._hidden = torch.empty(0)
        self._places: dict[Sequence, tuple[int, range]] = {}  # position of the first point, and rows of `hidden`

    def copied(self, pairs: list[tuple[int, int]]) -> None:
        return None

    def clear(self) -> None:
        self._hidden, self._places = torch.empty(0), {}

    def saw(self, feeds: list[Feed], batch: Batch, hidden: Tensor) -> None:
        """Of a step that was split around a fault only the last part is kept: the others miss one draft."""
        self._hidden, self._places = hidden, {}
        row = 0
        for feed in feeds:
            rows = range(row, row + feed.num_points)
            self._places[feed.sequence] = feed.start + feed.count - len(rows), rows
            row = rows.stop

    def row(self, sequence: Sequence) -> int | None:
        """The row of the state that the sequence's newest token was drawn from."""
        first, rows = self._places.get(sequence, (0, range(0)))
        place = len(sequence.tokens) - 2 - first
        return rows[place] if 0 <= place < len(rows) else None

    def of(self, sequences: list[Sequence], link: Link) -> Tensor:
        """[len(sequences), H]; the device is not waited for."""
        return self._hidden[link.to_device(np.array([self.row(sequence) for sequence in sequences], np.int64))]


@dataclass(frozen=True, slots=True)
class RunningHeads:
    """Heads over the states of the last step: draws as the target would, with the noise of the place."""

    heads: tuple[MedusaHead, ...]
    sampler: Sampler
    states: LastStates = field(default_factory=LastStates)

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    def reset(self) -> None:
        self.states.clear()

    def sees(self, sequence: Sequence) -> bool:
        return self.states.row(sequence) is not None

    @torch.inference_mode()
    def execute(self, step: Step) -> list[list[Drawn]]:
        """Every feed is one token behind a draft of the same length, which says what head draws there."""
        (number,) = {len(feed.draft) for feed in step.feeds}
        points = [point for feed in step.feeds for point in feed.points]
        self.sampler.prepare(points)
        hidden = self.states.of([feed.sequence for feed in step.feeds], self.sampler.link)
        draws = draw_in_parts(self.sampler, self.heads[number], points, hidden)
        return [[one] for one in draws.wait()]
