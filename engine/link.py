"""Between host and device: arrays of a step on their way there, results on their way back, without waiting.

Knows memory and copies; what is copied, and when a result is needed, is not known here.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Fetched = Callable[[], tuple[Tensor, ...]]


class Link(Protocol):
    """The way to one device and back. `to_device` is ordered before what is launched after it."""

    device: torch.device

    def bind(self) -> None:
        """Makes the device the current one of this thread, which launches go to."""
        ...

    def to_device(self, values: NDArray[np.generic]) -> Tensor: ...

    def to_host(self, tensors: tuple[Tensor, ...]) -> Fetched:
        """Begins to copy; the function returned waits for the copies, but for nothing launched after this call."""
        ...


class SameMemory:
    """The device is the host."""

    device = torch.device("cpu")

    def bind(self) -> None:
        return None

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values))

    def to_host(self, tensors: tuple[Tensor, ...]) -> Fetched:
        return lambda: tensors


class CudaLink:
    """Through page-locked memory, which torch keeps until the copies from and to it are done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def bind(self) -> None:
        torch.cuda.set_device(self.device)

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).pin_memory().to(self.device, non_blocking=True)

    def to_host(self, tensors: tuple[Tensor, ...]) -> Fetched:
        copies = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))

        def wait() -> tuple[Tensor, ...]:
            copied.synchronize()
            return copies

        return wait


def link_to(device: torch.device) -> Link:
    return SameMemory() if device.type == "cpu" else CudaLink(device)
