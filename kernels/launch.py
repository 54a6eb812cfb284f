"""One launch of a Triton kernel as a value: what runs, over which grid, with which arguments and constants.

Knows the call convention alone. Planning and running are apart, so that the same plan can be compiled where there is no
device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """`arguments` in the order of the kernel's parameters, then `constants` by name.

    `fused`: a product and a sum may be rounded once, which is faster; else each is rounded, as a reference does it.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    fused: bool = True

    def run(self) -> None:
        """Puts the kernel into the device's queue; an empty grid is no launch."""
        if all(self.grid):
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options())

    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fused}


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
