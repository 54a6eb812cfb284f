"""Recordings of forward passes on each kind of device: graphs of a card, tapes of the native library.

Knows how a call is recorded and played again, and in which sizes; not which steps are worth it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.native.tape import Memory, Tape

SMALLEST_TAPE = 64  # rows
LARGEST_GRAPH = 1024  # tokens; what memory is set aside for, see sizing.py


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of a step: the tokens that are fed, and those of them that are sampled from."""

    tokens: int
    sampled: int


Replay = Callable[[Size], Tensor]  # of so many rows at least, from the first on


class Recorder(Protocol):
    """Makes recordings of calls, which run them again on the same memory. A call may, but need not be run for it."""

    @property
    def scrap_blocks(self) -> int:
        """Blocks of the pages that rows of padding write to."""
        ...

    def size(self, step: Size) -> Size | None:
        """That of the recording by which such a step is run; None where it is launched kernel by kernel."""
        ...

    def record(self, call: Callable[[], Tensor], size: Size) -> Replay:
        """Raises NotRecordableError for what cannot be recorded."""
        ...


class CudaRecorder:
    """CUDA graphs with one memory pool, as they never run beside each other, captured on one stream of the device.

    On one, because libraries keep scratch memory for every stream; and on its own: that of torch is the first device's.
    """

    scrap_blocks = 1

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def size(self, step: Size) -> Size | None:
        """All of a graph is run, padding too: sizes are close to each other, and only those of decoding recur.

        Larger steps, whose launches are hidden, may be of prompts though all of their states are asked for.
        """
        padded = padded_size(step.tokens)
        return Size(padded, padded) if step.sampled == step.tokens <= LARGEST_GRAPH else None

    def record(self, call: Callable[[], Tensor], size: Size) -> Replay:
        current, aside = torch.cuda.current_stream(), self._aside
        aside.wait_stream(current)
        try:
            with torch.cuda.stream(aside):  # first without recording: kernels are compiled, libraries take scratch
                call()
        finally:
            current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        captured = torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(current), captured:  # a capture that fails may leave its own stream the current one
                out = call()
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # that of a void capture is never ended, and takes no other
            raise

        def replay(step: Size) -> Tensor:
            graph.replay()
            return out

        return replay


class NativeRecorder:
    """Tapes of the native library: one call for the hundreds of a step. They play the rows there are, no padding."""

    scrap_blocks = 0

    def __init__(self, library: Any) -> None:
        self._library = library
        self._memory = Memory()

    def size(self, step: Size) -> Size:
        """A tape plays for any fewer rows: steps of drafts, each of another size, need no tape of their own.

        Sampled rows are one more than they could be as tokens: by their number a tape tells what a call has rows of.
        """
        tokens = tape_size(step.tokens)
        return Size(tokens, tokens if step.sampled == step.tokens else tape_size(step.sampled) + 1)

    def record(self, call: Callable[[], Tensor], size: Size) -> Replay:
        tape = Tape(self._memory)
        out = tape.record(call)

        def replay(step: Size) -> Tensor:
            tape.play(self._library, {size.tokens: step.tokens, size.sampled: step.sampled})
            return out

        return replay


def tape_size(num_rows: int) -> int:
    """The next power of two: recordings are few."""
    return max(SMALLEST_TAPE, 1 << max(0, num_rows - 1).bit_length())


def padded_size(num_rows: int) -> int:
    """The size a step of so many rows is recorded in: 1, 2, 4, 8, then up to a seventh more, in whole eights."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = max(8, 1 << ((num_rows - 1).bit_length() - 3))
    return -(-num_rows // step) * step
