"""Which way a quantised product goes on a GPU: a pure function of the batch, the weight's shape and the chip.

The crossings are a literal table; what tuning has found for a device and a shape takes its place. Knows no tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ..chip import Chip
from ..launch import power_of_two
from ..rounding import INT8

if TYPE_CHECKING:
    from .layout import GroupedWeight

Path = Literal["tiles", "split", "dense", "library"]
LEAST_STEPS = 4  # of a program, where inputs are split
PROGRAMS_PER_MULTIPROCESSOR = 2  # that a split aims at, of tiles that leave room for a second
ROOMY = 64 * 128  # numbers of such a tile at most
LARGEST_SPLIT = 32
ALIGNED = 16  # outputs and inputs of the library's products
LEAST_TOKENS = 17  # of its product of whole numbers
TILE_TOKENS = (16, 32, 64, 128)  # tuning tries these
TILES = ((64, 4), (128, 4), (128, 8))  # outputs and warps
MOST_NUMBERS = 1024  # of a tile, a warp: more spill where scales come by groups


@dataclass(frozen=True, slots=True)
class Choice:
    """A way and its tile.

    tiles    a program multiplies all inputs of its outputs
    split    inputs are shared out among programs, their sums added up by a second kernel
    dense    the weight is expanded to numbers of the activations' type, then the vendor's product
    library  the vendor's product of 8-bit numbers
    """

    path: Path
    tokens: int = 16  # of a tile
    outputs: int = 128
    warps: int = 4
    stages: int = 4
    splits: int = 1

    def __str__(self) -> str:
        return self.path


UNBOUNDED = 1 << 62
MIXED = (  # codes of 4 bits, activations as 8-bit floats
    (16, Choice("split", 16, 128, 4, 4)),
    (32, Choice("split", 32, 128, 4, 4)),
    (64, Choice("split", 64, 128, 8, 4)),
    (1024, Choice("split", 128, 128, 8, 3)),
    (UNBOUNDED, Choice("dense")),
)
# By kind of product, up to so many tokens the choice.
TABLES: dict[str, tuple[tuple[int, Choice], ...]] = {
    "wide": (  # activations of 16 bits or more
        (16, Choice("split", 16, 128, 4, 4)),
        (32, Choice("split", 32, 128, 8, 4)),
        (64, Choice("split", 64, 128, 8, 3)),
        (UNBOUNDED, Choice("dense")),
    ),
    "sums": (  # the same for weights with a minimum, whose tiles need more registers
        (16, Choice("split", 16, 128, 4, 4)),
        (64, Choice("split", 32, 128, 8, 4)),
        (UNBOUNDED, Choice("dense")),
    ),
    **dict.fromkeys(("mixed", "mixed sums"), MIXED),
    "narrow": (  # codes of 8 bits on both sides, one scale for each output
        (16, Choice("split", 16, 128, 4, 4)),
        (64, Choice("split", 64, 128, 4, 4)),
        (UNBOUNDED, Choice("library")),
    ),
    "alone": (  # the same where the library has no such product
        (16, Choice("split", 16, 128, 4, 4)),
        (64, Choice("split", 64, 128, 4, 4)),
        (UNBOUNDED, Choice("tiles", 128, 128, 8, 3)),
    ),
    "grouped": (  # codes of 8 bits on both sides, scales for groups of inputs
        (16, Choice("split", 16, 128, 4, 4)),
        (64, Choice("split", 64, 128, 8, 4)),
        (UNBOUNDED, Choice("tiles", 64, 128, 8, 4)),
    ),
}


class Key(NamedTuple):
    """Products that are tuned together: a table, what a code stands for, inputs of a scale, and sizes."""

    table: str
    codes: str
    group: int
    tokens: int  # as `bucket` rounds them
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of one chip; `tuned` has what was measured on it, by `Key`."""

    chip: Chip
    tuned: Mapping[Any, Any]

    def choose(self, table: str, weight: "GroupedWeight", tokens: int) -> Choice:
        """The way for a batch of so many tokens, cut into programs."""
        key = Key(table, weight.kind, weight.group, bucket(tokens), *weight.shape)
        choice = self.tuned.get(key) or next(choice for most, choice in TABLES[table] if tokens <= most)
        return self.shared_out(choice, tokens, *weight.shape, weight.form.step)

    def shared_out(self, choice: Choice, tokens: int, outputs: int, inputs: int, step: int) -> Choice:
        """A split in as many parts as keep every multiprocessor busy; `step` inputs are read at once."""
        if choice.path != "split":
            return choice
        tiles = max(1, -(-tokens // choice.tokens) * -(-outputs // choice.outputs))
        steps = -(-inputs // step)
        at_once = PROGRAMS_PER_MULTIPROCESSOR if choice.tokens * choice.outputs <= ROOMY else 1
        wanted = self.chip.multiprocessors * at_once // tiles
        splits = max(1, min(wanted, steps // LEAST_STEPS, LARGEST_SPLIT))
        splits = -(-steps // -(-steps // splits))  # the steps of a part are whole: none is left without
        return replace(choice, path="split" if splits > 1 else "tiles", splits=splits)


def wide(choices: Choices, weight: "GroupedWeight", tokens: int) -> Choice:
    """For activations as they are."""
    return choices.choose("wide" if weight.minimum is None else "sums", weight, tokens)


def mixed(choices: Choices, weight: "GroupedWeight", tokens: int) -> Choice:
    """For codes of 4 bits and activations as 8-bit floats."""
    return choices.choose("mixed" if weight.minimum is None else "mixed sums", weight, tokens)


def narrow(choices: Choices, weight: "GroupedWeight", tokens: int, numbers: str, dtype: torch.dtype) -> Choice:
    """For activations as codes. The library has products of one scale an output, aligned, of floats in bfloat16."""
    aligned = weight.shape[0] % ALIGNED == 0 and (weight.steps * weight.form.step) % ALIGNED == 0
    served = tokens >= LEAST_TOKENS if numbers == INT8 else dtype == torch.bfloat16
    by_library = choices.chip.library and aligned and served
    return choices.choose("grouped" if weight.form.grouped else "narrow" if by_library else "alone", weight, tokens)


def bucket(tokens: int) -> int:
    """Batches that are tuned together: up to the next power of two, at least 16."""
    return max(16, power_of_two(tokens))


def candidates(table: str, tokens: int) -> Iterator[Choice]:
    """What tuning tries for a batch: the table's own choice, the whole-batch way, and tiles around."""
    ways = dict.fromkeys(choice for most, choice in TABLES[table] if tokens <= most)
    yield from ways
    for rows in (size for size in TILE_TOKENS if size < 2 * max(tokens, TILE_TOKENS[0])):
        for outputs, warps in TILES:
            if rows * outputs <= MOST_NUMBERS * warps:
                yield from (Choice("split", rows, outputs, warps, stages) for stages in (3, 4))
