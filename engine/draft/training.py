"""Trains Medusa heads over a frozen model on answers it has given: one residual block each, the model's own projection.

Knows tokens and hidden states; where rows come from and how heads are used afterwards is not known here.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from ...kernels import Kernels
from ..accuracy import Candidate, trace
from ..decoder import Decoder
from .heads import CONFIG, NUM_HEADS, NUM_LAYERS, SAFETENSORS

TEXTS_AT_ONCE = 64  # whose hidden states are in memory together
BATCH = 64  # positions of one optimiser step
NONE = -1  # no target: the answer ends before


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of the model's and the answer it gave."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, for how long; `held_out` is the share of rows that only measure."""

    heads: int = 3
    epochs: int = 4
    seed: int = 0
    rate: float = 1e-3  # of AdamW, at the start
    held_out: float = 0.1


@dataclass(frozen=True, slots=True)
class Examples:
    """States [N, H] float32 that the model drew a token from, and the tokens [N, K] after that one, or NONE."""

    hidden: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.hidden)


@dataclass(frozen=True, slots=True)
class Trained:
    """`weights` [K, H, H] and `biases` [K, H] float32; `accuracy`: top-1 on rows held out, by head."""

    weights: Tensor
    biases: Tensor
    accuracy: tuple[float, ...]
    num_examples: int
    num_held_out: int


def split(texts: Sequence[Text], plan: Plan) -> tuple[list[Text], list[Text]]:
    """Rows to train on and rows held out, at least one each, by the seed. Raises ValueError for fewer than two."""
    if len(texts) < 2:
        raise ValueError("heads need two answers at least: one to learn from, one to measure by")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(plan.seed)).tolist()
    count = min(max(1, round(plan.held_out * len(texts))), len(texts) - 1)
    return [texts[index] for index in order[count:]], [texts[index] for index in order[:count]]


def examples(decoder: Decoder, kernels: Kernels, texts: Sequence[Text], num_heads: int) -> Examples:
    """Runs the frozen model once over the texts, those with equal starts next to each other."""
    candidate = Candidate(decoder, kernels, decoder.kv_shape())
    ordered = sorted((text for text in texts if len(text.answer) > 1), key=lambda text: text.prompt)
    hidden, targets = [], []
    for first in range(0, len(ordered), TEXTS_AT_ONCE):
        part = ordered[first : first + TEXTS_AT_ONCE]
        seen = trace(candidate, [[*text.prompt, *text.answer] for text in part])
        for text, start, states in zip(part, seen.starts, seen.hidden, strict=True):
            hidden.append(states[len(text.prompt) - 1 - start :][: len(text.answer) - 1].float().clone())
            targets.append(_targets(text.answer, num_heads))
    if not hidden:
        return Examples(torch.empty(0, decoder.spec.hidden_size), torch.empty(0, num_heads, dtype=torch.int64))
    return Examples(torch.cat(hidden), torch.cat(targets))


def _targets(answer: list[int], num_heads: int) -> Tensor:
    """[len(answer) - 1, K]: at the state that drew token i, what heads are to draw: i + 1, i + 2, ..."""
    padded = torch.tensor([*answer[1:], *[NONE] * num_heads])
    return padded.unfold(0, num_heads, 1)[: len(answer) - 1]


def train(
    decoder: Decoder, learn: Examples, measure: Examples, plan: Plan, told: Callable[[str], None] = lambda line: None
) -> Trained:
    """Heads that start as the model's own head, fitted with AdamW under a falling rate, in float32.

    `told` gets a line per epoch. Raises ValueError when there is nothing to learn or to measure.
    """
    if not len(learn) or not len(measure):
        raise ValueError("no answer is longer than a token; heads guess at the second and later ones")
    size = decoder.spec.hidden_size
    weights = torch.zeros(plan.heads, size, size, requires_grad=True)
    biases = torch.zeros(plan.heads, size, requires_grad=True)
    projection = decoder.head_weight()
    optimiser = torch.optim.AdamW([weights, biases], lr=plan.rate, weight_decay=0.0)
    batches = _batches(len(learn), plan)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, len(batches))
    losses: list[float] = []
    for number, rows in enumerate(batches, 1):
        optimiser.zero_grad()
        losses += [_learn(head, weights, biases, projection, learn, rows) for head in range(plan.heads)]
        optimiser.step()
        schedule.step()
        if number * plan.epochs % len(batches) == 0:
            told(f"epoch {number * plan.epochs // len(batches)}: loss {sum(losses) / len(losses):.3f}")
            losses = []
    with torch.no_grad():
        right = [_accuracy(head, weights, biases, projection, measure) for head in range(plan.heads)]
    return Trained(weights.detach(), biases.detach(), tuple(right), len(learn), len(measure))


def _batches(count: int, plan: Plan) -> list[Tensor]:
    """Rows of every optimiser step, each epoch in an order of its own."""
    generator = torch.Generator().manual_seed(plan.seed)
    return [rows for _ in range(plan.epochs) for rows in _parts(torch.randperm(count, generator=generator))]


def _parts(rows: Tensor) -> list[Tensor]:
    return [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]


def _learn(head: int, weights: Tensor, biases: Tensor, projection: Tensor, learn: Examples, rows: Tensor) -> float:
    """Adds the gradient of one head's loss on some rows; head by head, so that the logits of one are in memory."""
    rows = rows[learn.targets[rows, head] != NONE]
    if not len(rows):
        return 0.0
    loss = cross_entropy(
        _logits(weights[head], biases[head], projection, learn.hidden[rows]), learn.targets[rows, head]
    )
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _logits(weight: Tensor, bias: Tensor, projection: Tensor, hidden: Tensor) -> Tensor:
    return (hidden + silu(hidden @ weight.T + bias)) @ projection.T


def _accuracy(head: int, weights: Tensor, biases: Tensor, projection: Tensor, measure: Examples) -> float:
    """Share of the rows with a target where the likeliest token is that target."""
    rows = (measure.targets[:, head] != NONE).nonzero().squeeze(1)
    right = 0
    for part in _parts(rows):
        drawn = _logits(weights[head], biases[head], projection, measure.hidden[part]).argmax(-1)
        right += int((drawn == measure.targets[part, head]).sum())
    return right / max(1, len(rows))


def write_heads(directory: Path, trained: Trained, model: str) -> None:
    """The two files of a Medusa checkpoint, the heads without a projection of their own."""
    tensors: dict[str, Tensor] = {}
    for head, (weight, bias) in enumerate(zip(trained.weights, trained.biases, strict=True)):
        tensors |= {f"{head}.0.linear.weight": weight.contiguous(), f"{head}.0.linear.bias": bias.contiguous()}
    (directory / SAFETENSORS).write_bytes(save(tensors))
    config = {NUM_HEADS: len(trained.weights), NUM_LAYERS: 1, "base_model_name_or_path": model}
    config["held_out_accuracy"] = [round(value, 4) for value in trained.accuracy]
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
