"""All copies of KV blocks in one launch by Triton, whatever the size of the pages. Knows words, not formats."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch

WORDS = 1024  # of a program: 4 warps with 8 words of 4 bytes a thread


@triton.jit(do_not_specialize=["num_blocks"])
def copy_words(stored, pairs, runs, num_blocks, words, WORDS: tl.constexpr):
    """A piece of one block of one run of blocks, those of a layer, side and head: stored [runs, num_blocks, words]."""
    pair, run = tl.program_id(0) // runs, (tl.program_id(0) % runs).to(tl.int64)
    first = stored + run * num_blocks * words
    place = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source, destination = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    numbers = tl.load(first + source * words + place, mask=place < words)
    tl.store(first + destination * words + place, numbers, mask=place < words)


def copy_blocks(stored: Tensor, pairs: Tensor) -> None:
    """stored [L, S, K, N, B, W] is written in place; see the contract."""
    if stored.numel():
        plan(stored, pairs).run()


def plan(stored: Tensor, pairs: Tensor) -> Launch:
    """The launch for pages that hold something."""
    *outer, num_blocks, block_size, width = stored.shape
    blocks = stored.view(torch.uint8).view(*outer, num_blocks, block_size * width * stored.itemsize)
    if blocks.shape[-1] % 4 == 0:
        blocks = blocks.view(torch.int32)
    words, runs = blocks.shape[-1], blocks[..., 0, 0].numel()
    grid = (len(pairs) * runs, triton.cdiv(words, WORDS))
    return Launch(copy_words, grid, (blocks, pairs, runs, num_blocks, words), {"WORDS": WORDS})
