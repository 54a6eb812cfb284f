"""Which way a quantised product goes on a GPU: a pure function of the batch, the weight's shape and the chip.

The crossings are a literal table; what tuning has found for a device and a shape takes its place. Knows no tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..chip import Chip
from ..launch import power_of_two

Path = Literal["tiles", "split", "dense", "library"]
LEAST_STEPS = 4  # of a program, where inputs are split
PROGRAMS_PER_MULTIPROCESSOR = 2  # that a split aims at
LARGEST_SPLIT = 32


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


# Up to so many tokens, the choice. Activations of 16 bits (of 32 the same), then codes of 8 bits on both sides.
WIDE: tuple[tuple[int, Choice], ...] = (
    (16, Choice("split", 16, 128, 4, 4)),
    (32, Choice("split", 32, 128, 8, 4)),
    (64, Choice("split", 64, 128, 8, 3)),
    (1 << 62, Choice("dense")),
)
NARROW: tuple[tuple[int, Choice], ...] = (
    (16, Choice("split", 16, 128, 4, 4)),
    (32, Choice("split", 32, 128, 4, 4)),
    (64, Choice("split", 64, 128, 4, 4)),
    (1 << 62, Choice("library")),
)
ALONE = (*NARROW[:-1], (1 << 62, Choice("tiles", 128, 128, 8, 3)))  # where the library has no such product
Key = tuple[str, int, int, int]  # table, tokens as `bucket` rounds them, outputs, inputs
TABLES = {"wide": WIDE, "narrow": NARROW, "alone": ALONE}


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of one chip; `tuned` has what was measured on it."""

    chip: Chip
    tuned: Mapping[Key, Choice]

    def choose(self, table: str, tokens: int, outputs: int, inputs: int, step: int) -> Choice:
        """The way for a batch of so many tokens, cut into programs; `step` inputs are read at once."""
        key = (table, bucket(tokens), outputs, inputs)
        choice = self.tuned.get(key) or next(choice for most, choice in TABLES[table] if tokens <= most)
        return self.shared_out(choice, tokens, outputs, inputs, step)

    def shared_out(self, choice: Choice, tokens: int, outputs: int, inputs: int, step: int) -> Choice:
        """A split in as many parts as keep every multiprocessor busy; one part is tiles."""
        if choice.path != "split":
            return choice
        tiles = -(-tokens // choice.tokens) * -(-outputs // choice.outputs)
        steps = -(-inputs // step)
        wanted = self.chip.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // tiles
        splits = max(1, min(wanted, steps // LEAST_STEPS, LARGEST_SPLIT))
        return replace(choice, path="split" if splits > 1 else "tiles", splits=splits)


def bucket(tokens: int) -> int:
    """Batches that are tuned together: up to the next power of two, at least 16."""
    return max(16, power_of_two(tokens))


def candidates(table: str, tokens: int) -> Iterator[Choice]:
    """What tuning tries for a batch."""
    if table == "wide" and tokens > 16:
        yield Choice("dense")
    if table == "narrow" and tokens > 16:
        yield Choice("library")
    most = 128 if table != "wide" else 64
    for rows in (size for size in (16, 32, 64, 128) if size <= most and size < 2 * max(tokens, 16)):
        for outputs in (64, 128):
            for warps in (4, 8):
                if rows * outputs // warps <= 2048 and (outputs, warps) != (64, 8):
                    yield from (Choice("split", rows, outputs, warps, stages) for stages in (3, 4))
