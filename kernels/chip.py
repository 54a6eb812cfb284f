"""What a kernel's launch plan needs to know of a GPU. Knows numbers, not products."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chip:
    """Compute capability (9, 0 for H100 and H200), and how many multiprocessors share the work.

    `library`: the vendor's products of 8-bit numbers are at hand, which take CUDA tensors.
    """

    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    library: bool = True

    @property
    def has_fp8(self) -> bool:
        """Products of 8-bit floats in hardware."""
        return self.capability >= (8, 9)


def chip_of(card: int | torch.device) -> Chip:
    """That of a CUDA device, or of the one with this number. Raises ValueError for a GPU that is too old."""
    properties = torch.cuda.get_device_properties(card)
    capability = (properties.major, properties.minor)
    if capability < (8, 0):
        name = f"{properties.name} (compute capability {capability[0]}.{capability[1]})"
        raise ValueError(f"device 'cuda': {name} is older than 8.0, the oldest there are kernels for; use device: cpu")
    return Chip(capability, properties.multi_processor_count)
