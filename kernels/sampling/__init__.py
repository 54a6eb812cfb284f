"""From logits to tokens: the contract of `finite`, `penalise`, `sample` and `logprobs`.

logits [R, V] float32, contiguous; never written to. Ids at or above the tokenizer's length are -inf already, as are
tokens that a grammar or min_tokens forbids. What a row gets depends on that row alone, bit for bit.

finite(logits): [R] bool. False for a row that holds NaN or +inf, or -inf alone: nothing can be drawn from it. The other
    ops give some id of the vocabulary for such a row, and its neighbours what they get without it.
penalise(logits, penalties): new logits [R, V]. Repetition divides positive logits and multiplies the others by the
    penalty, once for every token of prompt or answer; then presence subtracts a constant and frequency a multiple of
    the count, for tokens of the answer.
sample(logits, filters): token ids [R] int64. Temperature 0 takes the arg-max, the lowest id among equals. Otherwise
    logits / temperature, best first and lowest id first among equals, cut by
      top-k  to the first k,
      top-p  to the shortest beginning of these that holds at least top_p of their probability,
      min-p  to those at least min_p times as probable as the best;
    the best always stays. Of what is left the arg-max of (logit + noise), the lowest id among equals.
logprobs(logits, tokens, top): log-softmax of the raw logits: own [R], top values [R, top], top ids [R, top] int64 (best
    first, lowest id first among equals; top at most V).

The noise of token id v under the key (k0, k1) is Gumbel noise made of 32-bit words (products modulo 2^32, >> brings in
zeros):

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    bits   = mix((mix(v) ^ k0) + k1)
    w      = min(((bits & 0x7fffffff) + 0.5) / 2^31, 1 - 2^-24)     in float32
    noise  = -log(-log(1 - w)),  computed as -log(-log1p(-w))        in float32

so the large values, which decide, are resolved to 2^-31 and noise lies between -2.82 and 22.2. `noise.noise_key` makes
the key from (seed, row, sample, token). mix is the mixer that Chris Wellons published as lowbias32.
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
    noise_keys: "Tensor"  # [R, 2] int64, each in 0 .. 2**32 - 1, made by `noise.noise_key`


@dataclass(frozen=True, slots=True)
class Penalties:
    """Sparse token counts of the rows that carry a penalty; entries of one row are distinct tokens."""

    rows: "Tensor"  # [E] int64 row of each entry
    tokens: "Tensor"  # [E] int64
    answer_counts: "Tensor"  # [E] float32, how often in the answer so far (0: only in the prompt)
    repetition: "Tensor"  # [R] float32, 1 off
    presence: "Tensor"  # [R] float32, 0 off
    frequency: "Tensor"  # [R] float32, 0 off
