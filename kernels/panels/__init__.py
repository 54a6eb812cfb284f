"""What linear_int8 and linear_int4 share: how activations are quantised, and the weight as panels of 16 outputs.

A weight is stored as whole numbers q with a scale, and perhaps a minimum, for every group of G inputs of an output:

    value[o, h] = scale[o, h // G] * q[o, h] + minimum[o, h // G]

The last group may be short; G is a multiple of 4, or at least H (one group for each output). Activations are quantised
when they arrive, symmetrically, one scale for each token and segment of S inputs, all in float32:

    largest = max |x| of the segment; a = largest / 127, or 0 where largest < 2^-100, or NaN where x is not finite
    code = round(x * (127 / largest)), ties to even; x' = a * code

S is 32, or gcd(G, 32) where groups do not consist of whole segments. (One scale for the whole token is too coarse: on
SmolLM2 it changes 7 % of the greedy tokens, segments of 32 change less than 1 %.) Then

    out[t, o] = sum over h of x'[t, h] * value[o, h] + bias[o]

Codes are multiplied and summed over a segment in whole numbers, hence exactly; sums over segments are float32.
A token with a number that is not finite gives a row of NaN and leaves the others alone.
"""

from math import gcd

SEGMENT = 32
LEAST_SEGMENT = 4
OUTPUTS = 16  # of a panel


def segment_of(group: int, inputs: int) -> int:
    """Inputs that share a scale of the activations. Raises ValueError for a group size that is not supported."""
    size = SEGMENT if group >= inputs else gcd(group, SEGMENT)
    if size < LEAST_SEGMENT:
        raise ValueError(f"quantised linear: groups of {group} inputs, not a multiple of {LEAST_SEGMENT}")
    return size
