"""The quantised linears of every device: values and activations. And of CPUs: the weight as panels of 16 outputs.

A weight is stored as whole numbers q with a scale, and perhaps a minimum, for every group of G inputs of an output:

    value[o, h] = scale[o, h // G] * q[o, h] + minimum[o, h // G]

The last group may be short; G is a multiple of 4, or at least H (one group for each output). Then

    out[t, o] = sum over h of x'[t, h] * value[o, h] + bias[o]

A weight may be turned: then q stands for the numbers times the orthonormal Hadamard matrix of each 64 inputs, and x is
turned alike, in float32, before it is rounded. That leaves the product what it was, and spreads the numbers that stand
out, which make a scale coarse for their neighbours. A turned weight may be balanced: before they are turned its numbers
have been divided by a factor for each input, and x is multiplied by it, in float32. What rounding one of the two loses
the other multiplies: factors that lie between the strengths of both make that least (engine/balance.py).

where x' is what a table makes of the activations. `rounding(weight)` names its rule, the same for every batch:

    own       x' = x; where the product is the vendor's, the values are rounded to the dtype of x
    bfloat16  x' is x rounded to bfloat16
    int8      one scale for each token and segment of S inputs, all in float32:
              largest = max |x| of the segment; a = largest / 127, or 0 where largest < 2^-100, or NaN where x is not
              finite; code = round(x * (127 / largest)), ties to even; x' = a * code
    e4m3      the same with 448 for 127, and the next 8-bit float for the next whole number

CPUs take int8 with segments of 64, or gcd(G, 64) where groups do not consist of whole segments; where the weight is
turned, with the longest of 256, 192, 128 and 64 that H consists of. (The longer, the faster and the coarser. Mean KL
from SmolLM2 in float32 once its linears have 8 bits, in nat: segments of 32 0.0070, of 64 0.0088, of 192 0.0152;
turned, of 192 and 256, 0.0044, and balanced 0.0029.) GPUs take int8 or e4m3 with one scale for each token where a
weight of 8 bits has one scale for each output, e4m3 with segments of 128 where its groups consist of whole ones, and
leave activations alone with any other weight of 8 bits. With 4 bits in groups of 32 or multiples they take e4m3 with
one scale for each token where the chip multiplies such numbers (for the vendor's product, of many tokens, x' is rounded
to the dtype of x), and leave them alone elsewhere. GPUs leave activations alone with a turned weight too.

Codes are multiplied and summed over a segment in whole numbers, hence exactly; sums over segments are float32. (Sums
of e4m3 by the tensor cores keep some 14 bits within 128 products.) A token with a number that is not finite gives
a row of NaN, with `own` of NaN or infinities, and leaves the others alone.
"""

from math import gcd

SEGMENT = 64
LEAST_SEGMENT = 4
TURNED = 64  # inputs that a Hadamard matrix mixes
TURNED_SEGMENTS = (256, 192, 128, 64)
OUTPUTS = 16  # of a panel


def can_turn(inputs: int) -> bool:
    return inputs % TURNED == 0


def segment_of(group: int, inputs: int, turned: bool = False) -> int:
    """Inputs that share a scale of the activations. Raises ValueError for a group size that is not supported."""
    if turned:
        return next(size for size in TURNED_SEGMENTS if inputs % size == 0)
    size = SEGMENT if group >= inputs else gcd(group, SEGMENT)
    if size < LEAST_SEGMENT:
        raise ValueError(f"quantised linear: groups of {group} inputs, not a multiple of {LEAST_SEGMENT}")
    return size
