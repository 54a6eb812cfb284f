"""Processes of the GPU benchmark: a pool that compiles kernels beside each other, and single ones that time them.

A compilation takes one core a second or two, and hundreds are asked for; what a process compiled stays on disk for the
others. A process whose device faults, or that does not end, costs its own work and no other's. Knows nothing of what is
called.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import TimeoutError as NotInTime
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool, ThreadPool
from typing import Any

import torch
from gpu_results import Results

from batchgen.engine.device import resolve_device

MOST = 12  # processes; each takes half a GiB of the device
ENDING = 20  # seconds in which a process gives the device back
LEFT_OUT = "left out"  # of a call that did not end in its time
Call = tuple[Callable[..., Any], tuple[Any, ...]]


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


def started(pool: Pool, calls: Sequence[Call]) -> "list[AsyncResult[Any]]":
    """The calls, waiting for their turn or under way."""
    return [pool.apply_async(call, arguments) for call, arguments in calls]


def outcomes(calls: "Sequence[AsyncResult[Any]]", left: Callable[[], float]) -> list[Any]:
    """What the calls return, or LEFT_OUT for those that had not ended when no time was left."""
    return [_outcome(one, left) for one in calls]


def _outcome(call: "AsyncResult[Any]", left: Callable[[], float]) -> Any:
    try:
        return call.get(max(0.0, left()))
    except NotInTime:
        return LEFT_OUT


class Relay:
    """Stands for the results in a process: sends records to those of the one that started it."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def add(self, part: str, name: str, **fields: Any) -> None:
        self._sender.send((part, name, fields))


class Apart:
    """A process that is there at once and takes the device when `run` is called; on a CPU the caller's own."""

    def __init__(self, device: torch.device) -> None:
        self._process = None
        if device.type != "cpu":
            context = get_context("spawn")
            self._here, there = context.Pipe()
            self._process = context.Process(target=_serve, args=(there, str(device)), daemon=True)
            self._process.start()
            there.close()

    def run(self, results: Results, title: tuple[str, str], seconds: float, call: Call) -> None:
        """Runs call(results, ..), whose records become those of `results`; a fault, or no end, is one by its title."""
        work, arguments = call
        if self._process is None:
            work(results, *arguments)
            return
        self._here.send(call)
        end, ended = time.perf_counter() + seconds, False
        while not ended and self._here.poll(max(0.0, end - time.perf_counter())):
            record = _received(self._here)
            ended = record is None
            if record is not None:
                results.add(*record[:2], **record[2])
        self._process.join(ENDING if ended else 0)
        code = self._process.exitcode
        self._process.kill()
        if code != 0:
            what = f"the process ended with {code}" if ended else f"it did not end in {seconds:.0f} s"
            results.add(*title, ok=False, error=what)


def _received(here: Any) -> Any:
    """None where there is nobody left to send."""
    try:
        return here.recv()
    except EOFError:
        return None


def _serve(there: Any, device: str) -> None:
    work, arguments = there.recv()
    begin(device)
    work(Relay(there), *arguments)
