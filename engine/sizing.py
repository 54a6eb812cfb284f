"""How much memory the KV cache gets: what is free beside the weights and beside the largest step, run once to see.

Makes a step of rows that nobody asked for; knows nothing of real ones.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from .checkpoint import ModelError
from .machine import free_memory
from .memory import cache_bytes
from .recorders import LARGEST_GRAPH
from .request import Request, Sampling
from .runner import Runner
from .sequence import Feed, Sequence, Step, Task
from .stopping import NoStops
from .token_counts import PromptAndAnswerCounts

# Draws with most copies of the logits: one for log-probabilities, one for penalties; choices are scored with two.
DEMANDING = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, logprobs=5, max_tokens=2)


class Meter(Protocol):
    """Watches the memory of a device."""

    def peak(self) -> int:
        """Bytes in use at most since the last call, beyond those in use at its end."""
        ...


class AllocatorMeter:
    """Reads torch's allocator, which is told to give back what it keeps for later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = 0

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - self._start
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)
        return peak


def largest_step(num_tokens: int, num_sequences: int, block_size: int, *, draws: bool = True) -> Step:
    """As many sequences and tokens as a step can have; all of them draw, or none, as if more were to be fed."""
    feeds: list[Feed] = []
    next_block = 0
    for index in range(num_sequences):
        count = num_tokens // num_sequences + (index < num_tokens % num_sequences)
        feeds.append(_feed(index, count, range(next_block, next_block + -(-count // block_size)), draws))
        next_block += -(-count // block_size)
    return Step([], feeds)


def blocks_of(step: Step) -> int:
    """KV blocks that a step made here writes to."""
    return sum(len(feed.sequence.blocks) for feed in step.feeds)


def working_bytes(runner: Runner, step: Step, meter: Meter) -> int:
    """What a step takes beside weights and pages; it runs twice, for what libraries set up the first time."""
    for _ in range(2):
        meter.peak()
        runner.start(step.feeds).wait()
    return meter.peak()


def _measured(runner: Callable[[int], Runner], num_tokens: int, num_sequences: int, block_size: int) -> int:
    """The largest step, and what recordings of steps keep for themselves: the largest of these without its draws.

    Raises ModelError when there is not so much.
    """
    rows, most = min(num_tokens, num_sequences), min(num_tokens, LARGEST_GRAPH)
    largest, recorded = largest_step(num_tokens, rows, block_size), largest_step(most, most, block_size, draws=False)
    try:
        small = runner(max(blocks_of(largest), blocks_of(recorded)))
        meter = AllocatorMeter(small.device)
        return sum(working_bytes(small, step, meter) for step in (largest, recorded))
    except (MemoryError, torch.OutOfMemoryError):
        raise ModelError(
            f"engine.max_batch_tokens: a step of {num_tokens} tokens does not fit beside the weights; "
            f"lower it, or engine.max_sequences ({rows} rows)"
        ) from None


def _paged_by_the_system(runner: Callable[[int], Runner], num_tokens: int, num_sequences: int, block_size: int) -> int:
    """Host memory that a step takes is not set aside: `auto` asks for a small part of it, and pages come when used."""
    return 0


# By kind of device: bytes for steps of so many tokens and sequences, over blocks of one size.
WORKING_BYTES: dict[str, Callable[[Callable[[int], Runner], int, int, int], int]] = {
    "cpu": _paged_by_the_system,
    "cuda": _measured,
}


def kv_cache_bytes(memory: str | int | float, device: torch.device, working: int) -> int:
    """Bytes of KV cache for an `engine.memory` value, with `working` bytes left to the steps.

    Raises ModelError when the bytes asked for are not there.
    """
    free = max(0, free_memory(device) - working)
    size = cache_bytes(memory, device.type, free)
    if device.type == "cuda" and size > free:
        raise ModelError(
            f"engine.memory: {memory}, but beside weights and steps {device} has {free / 2**30:.1f} GiB free; "
            "ask for less, or lower engine.max_batch_tokens"
        )
    return size


def _feed(key: int, count: int, blocks: range, draws: bool) -> Feed:
    prompt = [0] * (count if draws else count + 1)
    task = Task(Request(key, prompt, DEMANDING), tuple(prompt), 0, frozenset(), [None])
    sequence = Sequence(task, 0, prompt, NoStops(), PromptAndAnswerCounts(prompt, DEMANDING.max_tokens))
    for block in blocks:
        sequence.add_block(block)
    return Feed(sequence, 0, count)
