"""Which device a run computes on: what an `engine.device` value means on this machine, or why it cannot be had.

Asks torch and Triton what there is; decides nothing about a job.
"""

import logging
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from .. import kernels
from ..kernels import Kernels
from .checkpoint import ModelError
from .processor import Place, processor_name

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Cuda:
    """What this torch has of CUDA: why it reaches no device, else each device's name and compute capability."""

    fault: str | None
    devices: tuple[tuple[str, tuple[int, int]], ...] = ()
    triton: bool = True

    def refusal(self, index: int) -> str | None:
        """Why the device with this number cannot be used."""
        if self.fault is not None:
            return self.fault
        if index >= len(self.devices):
            count = len(self.devices)
            return f"there {'is' if count == 1 else 'are'} {count} CUDA device{'s' * (count != 1)}, numbered from 0"
        name, capability = self.devices[index]
        if capability < LEAST_CAPABILITY:
            have, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
            return f"{name} has compute capability {have}, the kernels need {least} (Ampere) or newer"
        return None if self.triton else "the kernels need Triton: pip install triton"


def find_cuda() -> Cuda:
    """What there is here."""
    if torch.version.cuda is None:
        return Cuda(f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch, or use cpu")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        return Cuda(f"CUDA does not start: {str(error).splitlines()[0]}")
    if not count:
        return Cuda("CUDA shows no device; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    devices = tuple(
        (torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)) for index in range(count)
    )
    return Cuda(None, devices, find_spec("triton") is not None)


def resolve_device(name: str) -> torch.device:
    """The torch device of an `engine.device` value; a CUDA device becomes the current one of this process.

    `auto` takes the first CUDA device that can be used, and the CPU where none can. Raises ModelError, with the reason,
    when a named device cannot be used.
    """
    device = choose_device(name, Cuda("not asked for") if name == "cpu" else find_cuda())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def find_place(name: str) -> Place:
    """What an `engine.device` value comes to here; like `resolve_device` otherwise."""
    return place_of(resolve_device(name))


def place_of(device: torch.device) -> Place:
    """The device by its name, for what is measured there."""
    return Place(device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name())


def load_kernels(device: torch.device) -> Kernels:
    """The op table of a device. Raises ModelError, with the reason, when there is none."""
    try:
        return kernels.load(str(device))
    except ValueError as error:
        raise ModelError(f"engine.device: {error}") from None


def choose_device(name: str, cuda: Cuda) -> torch.device:
    """The same, of what was found."""
    if name == "cpu":
        return torch.device("cpu")
    index = _first_usable(cuda) if name == "auto" else int(name.partition(":")[2] or 0)
    refusal = cuda.refusal(index)
    if refusal is None:
        log.info("engine.device: %s is cuda:%d, %s", name, index, cuda.devices[index][0])
        return torch.device("cuda", index)
    if name != "auto":
        raise ModelError(f"engine.device: {name} cannot be used: {refusal}")
    log.info("engine.device: auto is cpu: %s", refusal)
    return torch.device("cpu")


def _first_usable(cuda: Cuda) -> int:
    """The first device's number when none can be used: why not is asked of that one."""
    return next((index for index in range(len(cuda.devices)) if cuda.refusal(index) is None), 0)
