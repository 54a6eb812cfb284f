"""What a quantised linear makes of its activations before it multiplies. Each table states its rule for each weight.

Knows the rules by name; the arithmetic stands in kernels/panels, its formulas in the docstring there.
"""

from dataclasses import dataclass

OWN, BFLOAT16, INT8, E4M3 = "own", "bfloat16", "int8", "e4m3"
LARGEST = {INT8: 127.0, E4M3: 448.0}  # the code of the largest number of a segment


@dataclass(frozen=True, slots=True)
class Rounding:
    """`numbers`: own (as they are), bfloat16, or codes of int8 or e4m3 with a scale for every `segment` inputs.

    `turned`: inputs that a Hadamard matrix mixes before, or 1.
    """

    numbers: str
    segment: int = 0
    turned: int = 1
