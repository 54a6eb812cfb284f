"""The token mask by Triton: each program a piece of one row; only forbidden ids are written. Knows bits and logits."""

import triton
import triton.language as tl
from torch import Tensor

from ..launch import Launch

COLUMNS = 4096  # of a program


@triton.jit
def forbid(logits, rows, bits, row_stride, column_stride, vocabulary, words, COLUMNS: tl.constexpr):
    """A word is read by the 32 threads of its ids, which is one request to the cache; no logit is read."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    tokens = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tokens // 32
    word = tl.load(bits + number * words + place, mask=place < words, other=0)
    forbidden = (tokens < vocabulary) & (((word >> (tokens % 32)) & 1) == 0)
    target = logits + row * row_stride + tokens.to(tl.int64) * column_stride
    tl.store(target, tl.full([COLUMNS], float("-inf"), tl.float32), mask=forbidden)


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Writes -inf where a bit is 0; see the contract."""
    plan(logits, rows, bits).run()


def plan(logits: Tensor, rows: Tensor, bits: Tensor) -> Launch:
    """The launch for logits [R, V], rows [M] and bits [M, W]."""
    vocabulary, words = logits.shape[1], bits.shape[1]
    grid = (len(rows), triton.cdiv(vocabulary, COLUMNS))
    arguments = (logits, rows.contiguous(), bits.contiguous(), *logits.stride(), vocabulary, words)
    return Launch(forbid, grid, arguments, {"COLUMNS": COLUMNS})
