"""From logits to tokens: the contract of `penalise`, `sample` and `logprobs`.

logits [R, V] float32. Ids at or above the tokenizer's length are -inf already, as are tokens that a grammar or
min_tokens forbids.

penalise(logits, penalties): new logits [R, V]. Repetition divides positive logits and multiplies negative ones by the
    penalty, once for every token of prompt or answer; presence subtracts a constant and frequency a multiple of the
    count, for tokens of the answer.
sample(logits, filters): token ids [R] int64. Temperature 0 takes the arg-max, the lowest id among equals. Otherwise
    logits / temperature, filtered in this order: top-k, top-p, min-p; the arg-max always survives; then
    arg-max of (logit + Gumbel noise), where the noise of (row, v) is a pure function of (noise key, v).
logprobs(logits, tokens, top): log-softmax of the raw logits: own [R], top values [R, top], top ids [R, top] (best
    first, lowest id first among equals).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """One value per sampled row. A row with neutral values is drawn from its whole distribution."""

    temperature: "Tensor"  # [R] float32, 0 greedy
    top_k: "Tensor"  # [R] int64, 0 off
    top_p: "Tensor"  # [R] float32, 1 off
    min_p: "Tensor"  # [R] float32, 0 off
    noise_keys: "Tensor"  # [R, 2] int64, each in 0 .. 2**32 - 1, made by `noise_key`


@dataclass(frozen=True, slots=True)
class Penalties:
    """Sparse token counts of the rows that carry a penalty; entries of one row are distinct tokens."""

    rows: "Tensor"  # [E] int64 row of each entry
    tokens: "Tensor"  # [E] int64
    answer_counts: "Tensor"  # [E] float32, how often in the answer so far (0: only in the prompt)
    repetition: "Tensor"  # [R] float32, 1 off
    presence: "Tensor"  # [R] float32, 0 off
    frequency: "Tensor"  # [R] float32, 0 off
