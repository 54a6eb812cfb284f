"""Calls of the GPU benchmark spread over processes, so that the kernels they need are compiled beside each other.

A compilation takes one core a second or two, and hundreds are asked for; what a process compiled stays on disk for the
others. Knows nothing of what is called.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import TimeoutError as NotInTime
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool, ThreadPool
from typing import Any

import torch

from batchgen.engine.device import resolve_device

MOST = 12  # processes; each takes half a GiB of the device
LEFT_OUT = "left out"  # of a call that did not end in its time


def begin(device: str) -> None:
    """What a process does first."""
    torch.set_num_threads(1)
    resolve_device(device)


@contextmanager
def workers(device: torch.device) -> Iterator[Pool]:
    """Processes with a context of the device each, ended with the work; a thread on a CPU, which compiles nothing."""
    if device.type == "cpu":
        with ThreadPool(1) as here:
            yield here
        return
    number = max(1, min(MOST, (os.cpu_count() or 1) - 2))
    with get_context("spawn").Pool(number, begin, (str(device),)) as made:
        yield made


def started(pool: Pool, call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> "list[AsyncResult[Any]]":
    """The calls, waiting for their turn or under way."""
    return [pool.apply_async(call, one) for one in arguments]


def outcomes(calls: "Sequence[AsyncResult[Any]]", left: Callable[[], float]) -> list[Any]:
    """What the calls return, or LEFT_OUT for those that had not ended when no time was left."""
    return [_outcome(one, left) for one in calls]


def _outcome(call: "AsyncResult[Any]", left: Callable[[], float]) -> Any:
    try:
        return call.get(max(0.0, left()))
    except NotInTime:
        return LEFT_OUT
