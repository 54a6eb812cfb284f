"""Calls of the native libraries, made at once or put on a tape to be made later, many by one call.

Every such call is one structure that begins with a number of rows: a tape that was made for some of them plays for any
smaller number too. Knows structures and memory, no op.
"""

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALIGNMENT = 64
READS = {"__get__", "__len__", "data_ptr", "dim", "is_contiguous", "size", "stride"}
VIEWS = {"__getitem__", "contiguous", "flatten", "reshape", "split_with_sizes", "unsqueeze", "view"}  # or copies
OVER_MEMORY = "frombuffer"


class NotRecordableError(RuntimeError):
    """Something was computed outside of the native libraries."""


class _Recording(threading.local):
    tape: "Tape | None" = None


_recording = _Recording()


def run(entry: Any, call: ctypes.Structure) -> None:
    """Calls an entry of a library, or puts the call on the tape that this thread records."""
    if _recording.tape is None:
        entry(ctypes.byref(call))
    else:
        _recording.tape.put(entry, call)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a result of `run`: of the tape's own while one records."""
    tape = _recording.tape
    return torch.empty(shape, dtype=dtype) if tape is None else tape.memory.empty(shape, dtype)


class Memory:
    """Tensors whose places are taken again when they are gone, for tapes that never play at the same time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Any]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of one number at least, at the start of a cache line, its contents undefined."""
        size = -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        places = self._free[size]
        place = places.pop() if places else ctypes.create_string_buffer(size + ALIGNMENT)
        start = ctypes.addressof(place)
        lease = (ctypes.c_char * size).from_address(start + -start % ALIGNMENT)
        weakref.finalize(lease, places.append, place)  # the tensor, and every view of it, holds the lease
        return torch.frombuffer(lease, dtype=dtype, count=prod(shape)).view(shape)


class _NothingBeside(TorchFunctionMode):
    """Lets torch look at tensors, and compute nothing: that would not be on the tape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in READS or name in VIEWS or name == OVER_MEMORY:
            result = func(*args, **(kwargs or {}))
            if name == OVER_MEMORY or _no_copies(result, args):
                return result
        raise NotRecordableError(f"torch.{name} has no entry in the native libraries")


def _no_copies(result: Any, args: Any) -> bool:
    """No tensor of the result has memory of its own."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    return all(part.untyped_storage().data_ptr() in known for part in found if isinstance(part, Tensor))


class _Entry(ctypes.Structure):
    """The fields stand in the same order in runtime.cpp."""

    _fields_ = (("function", ctypes.c_void_p), ("call", ctypes.c_void_p), ("rows", ctypes.c_void_p))


class Tape:
    """The calls of a computation, with all they read and write but what belongs to the caller."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._calls: list[tuple[Any, ctypes.Structure]] = []
        self._rows: dict[int, ctypes.c_int64] = {}  # of a call, by what they were when it was put down
        self._entries: Any = None

    def put(self, entry: Any, call: ctypes.Structure) -> None:
        self._calls.append((entry, call))

    def record(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, its contents undefined until the tape is played. Runs nothing.

        Raises NotRecordableError when it computes with anything but `run`.
        """
        _recording.tape = self
        try:
            with _NothingBeside():
                result = compute()
        finally:
            _recording.tape = None
        entries = [_Entry(_address(entry), ctypes.addressof(call), self._counter(call)) for entry, call in self._calls]
        self._entries = (_Entry * len(entries))(*entries)
        return result

    def play(self, library: Any, rows: Mapping[int, int]) -> None:
        """Makes all calls; those that were recorded for n rows for the first `rows[n]`."""
        for recorded, counter in self._rows.items():
            counter.value = rows[recorded]
        library.batchgen_play(self._entries, ctypes.c_int64(len(self._calls)))

    def _counter(self, call: Any) -> int:
        rows = ctypes.c_int64.from_buffer(call).value
        return ctypes.addressof(self._rows.setdefault(rows, ctypes.c_int64()))


def _address(entry: Any) -> int | None:
    return ctypes.cast(entry, ctypes.c_void_p).value
