"""How keys and values lie in the pages, format by format: the contract of `rotate_write` and `attention`.

Knows layouts and names, no arithmetic; that stands in reference.py. A vector is the key, or the value, of one token and
key/value head: D numbers x. It is stored as codes at codes[k, block, offset] and, where the format has them, as float32
scales at scales[k, block, offset]: the same place of another tensor, so whoever copies a block copies both.

    format              codes               W          S   a number is                       codes are made with
    float32             float32             D          0   code
    bfloat16, float16   their own           D          0   code
    fp8                 float8_e4m3fn       D          1   code * scale                      scale = largest |x| / 448
    int8                int8, -127 .. 127   D          1   code * scale                      scale = largest |x| / 127
    int4                uint8, two codes    ceil(D/2)  2G  code * scale + least, by group    scale = (most - least) / 15

int4: element e of a vector lies in byte e mod W, in the low half if e < W, else in the high half. Groups are 64
neighbouring elements, the last as many as are left (G = ceil(D/64)); scales holds the G steps, then the G least
numbers. Keys, not values, are turned first: multiplied by the orthonormal Hadamard matrix of the largest power of two p
that divides D, block by block of p elements. `attention` turns the queries of such pages alike, which leaves every
score what it was.

Scales are the vector's own, never a default. For every vector written:

* x times the float32 reciprocal of the scale is rounded to the nearest code, ties to even, and clipped to the codes;
* |x| counts as at most 2^126, so that what is read back is finite, and where |x| (int4: most - least) stays below
  2^-100 the scale is 0 and all codes are 0;
* a vector (int4: group; its keys: once turned) with a NaN or an infinity gets a scale of NaN and codes of 0, so that it
  reads as NaN throughout and its row is found out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

GROUP = 64  # elements with one scale in int4
NATIVE = frozenset({"float32", "bfloat16", "fp8", "int8", "int4"})  # formats that the native libraries know
MAX_NATIVE_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One line of the table. `number` is what the native library calls it."""

    name: str
    number: int
    dtype: torch.dtype  # of codes
    scaled: bool = False
    packed: bool = False  # two codes to an element, scales by group
    turned: bool = False  # keys are turned before they are stored

    def width(self, head_dim: int) -> int:
        """W: elements of the codes of one vector."""
        return -(-head_dim // 2) if self.packed else head_dim

    def num_scales(self, head_dim: int) -> int:
        """S: float32 numbers beside the codes of one vector."""
        return 2 * -(-head_dim // GROUP) if self.packed else int(self.scaled)

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one vector, scales included."""
        return self.width(head_dim) * self.dtype.itemsize + 4 * self.num_scales(head_dim)


FORMATS: Mapping[str, KVFormat] = {
    made.name: made
    for made in (
        KVFormat("float32", 0, torch.float32),
        KVFormat("bfloat16", 1, torch.bfloat16),
        KVFormat("fp8", 2, torch.float8_e4m3fn, scaled=True),
        KVFormat("int8", 3, torch.int8, scaled=True),
        KVFormat("int4", 4, torch.uint8, scaled=True, packed=True, turned=True),
        KVFormat("float16", 5, torch.float16),
    )
}


@dataclass(frozen=True, slots=True)
class Pages:
    """The keys, or the values, of one layer; physical block n holds B consecutive tokens."""

    format: KVFormat
    codes: Tensor  # [K, N, B, W], the vectors of a block and head side by side
    scales: Tensor  # [K, N, B, S] float32, likewise
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of one vector."""
        return self.codes.shape[3] * self.codes.itemsize

    def steps(self) -> set[tuple[int, int]]:
        """How many vectors lie from head to head and from block to block, in codes and in scales."""
        return {_steps(stored) for stored in (self.codes, self.scales) if stored.shape[3]}


@dataclass(frozen=True, slots=True)
class LayerPages:
    """What one layer has cached. The two formats may differ, the block ids serve both.

    Heads and blocks may lie any number of vectors apart, alike in all tensors (else ValueError); on a device other than
    the host they are contiguous.
    """

    keys: Pages
    values: Pages
    head_step: int = field(init=False)  # vectors from a head's first to the next head's
    block_step: int = field(init=False)

    def __post_init__(self) -> None:
        steps = self.keys.steps() | self.values.steps()
        if len(steps) > 1:
            raise ValueError(f"pages of a layer: heads and blocks lie differently far apart: {sorted(steps)}")
        for name, step in zip(("head_step", "block_step"), steps.pop(), strict=True):
            object.__setattr__(self, name, step)

    @property
    def num_kv_heads(self) -> int:
        return self.keys.codes.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.keys.codes.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.codes.shape[2]


def _steps(stored: Tensor) -> tuple[int, int]:
    """Vectors from head to head and from block to block; 0 where there is no next one."""
    heads, blocks, size, width = stored.shape
    step_of_head, step_of_block, *inner = stored.stride()
    if (size > 1 and inner[0] != width) or (width > 1 and inner[1] != 1):
        raise ValueError(f"pages of a layer: vectors of a block are not side by side, strides {stored.stride()}")
    return (step_of_head // width if heads > 1 else 0, step_of_block // width if blocks > 1 else 0)


def turn_width(head_dim: int) -> int:
    """p: the largest power of two that divides the head width. 1 leaves keys as they are."""
    return head_dim & -head_dim
