"""The block types of packed tensors: how many values share how many bytes. Their arithmetic is in `expand.py`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """`size` values of a row lie together in `bytes` bytes."""

    name: str
    size: int
    bytes: int

    def row_bytes(self, values: int) -> int:
        return values // self.size * self.bytes


# GGUF type numbers. Types that are not here are refused by number.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
