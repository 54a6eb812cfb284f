"""Micro-runs that say how fast this machine computes a model of a shape: two layers of random numbers, a few steps.

Knows decoders and kernels; the constants it finds are kept by who asks for them. Beside other work it finds none.
"""

import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import psutil
import torch

from ..kernels import Kernels
from ..kernels.kv_format import FORMATS as KV_FORMATS
from ..kernels.sampling import Filters
from .batch import Batch
from .decoder import Decoder, Embedding
from .device import load_kernels, resolve_device
from .graphs import EAGER, EXECUTORS, RECURS
from .key_timing import BLOCK_SIZE, LAYERS, SHARING, KeyTiming, items_of
from .kv import KVPages, KVShape
from .machine import DTYPES, use_granted_cores
from .models.names import dense_weights
from .rates import FORMATS, SIZES, Curve, Rates, built_in
from .recorders import LARGEST_GRAPH
from .spec import ModelSpec
from .weights.formats import weight_format
from .weights.load import Target, load_parts
from .weights.tensors import DenseTensor, TensorSource

NUM_LAYERS = 2
MOST_OUTPUTS = 8192  # of the head that is measured; the rest is in proportion
DRAWN = 1, 16, 64, 256
MOST_LOAD = 0.1  # of all cores, by others
FIRST_LOOK = 1.0  # seconds after which that load is looked at, before each number
LEAST_SECONDS = 0.02  # for each number
LEAST_CALLS = 4  # the first ones of a size grow the heap, a page fault at a time
# By kind of device: calls between two waits for it. A run looks ahead, which hides the launches, and what recurs is
# replayed from its RECURS-th time on, so from the second wait on it is replays that are timed.
AT_ONCE = {"cpu": 1, "cuda": RECURS + 1}
MOST_RECORDED = LARGEST_GRAPH  # tokens of a step


class DisturbedError(Exception):
    """The micro-runs say nothing: other programs were at work, or took the memory. One line."""


class TooLongError(DisturbedError):
    """Nor do they in the time they were given, with hardly anything beside them; they would not another time."""


def calibrate_device(spec: ModelSpec, dtype: str, device: str, seconds: float) -> Rates:
    """`calibrate` for values of the keys `model.dtype` (not auto) and `engine.device`."""
    use_granted_cores()
    place = resolve_device(device)
    return calibrate(spec, load_kernels(place), DTYPES[dtype], place, seconds)


def calibrate(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, device: torch.device, seconds: float) -> Rates:
    """The constants of this machine for a model of this shape, found in at most `seconds`. Raises DisturbedError."""
    watch = _Watch(seconds)
    try:
        rates = measure_rates(spec, kernels, dtype, Timer(device, watch.check))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise DisturbedError("the micro-runs found too little memory") from error
    watch.require_quiet()
    return rates


class _Watch:
    """What spoils measurements from now on: other programs, and more than so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start, self._busy, self._own = time.perf_counter(), self._all(), time.process_time()

    def check(self) -> None:
        """Raises DisturbedError as soon as it is known."""
        if self._elapsed() > FIRST_LOOK:
            self.require_quiet()
        if self._elapsed() > self._seconds:
            raise TooLongError("the micro-runs took too long")

    def require_quiet(self) -> None:
        """Raises DisturbedError when others used much of all cores so far."""
        others = self._all() - self._busy - (time.process_time() - self._own)
        share = others / max(1e-9, self._elapsed() * (psutil.cpu_count() or 1))
        if share > MOST_LOAD:
            raise DisturbedError(f"other programs used {share:.0%} of the processor during the micro-runs")

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start

    @staticmethod
    def _all() -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def measure_rates(spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, timer: "Timer") -> Rates:
    """The constants as the timer finds them; those of KV formats that only a job names are built in.

    Raises what the check of the timer does.
    """
    device = timer.device
    rough = built_in(spec, str(dtype).removeprefix("torch."), device.type)
    layers: dict[str, Curve] = {}
    head: dict[str, Curve] = {}
    for name in FORMATS:
        bench = _Bench(random_decoder(spec, name, kernels, dtype, device), kernels, timer)
        layers[name], head[name] = bench.layers(spec.num_layers), bench.head(spec.vocab_size)
    shapes = {
        name: KVShape(LAYERS, spec.num_kv_heads, spec.head_dim, KV_FORMATS[name])
        for name in _kv_names(dtype, KV_FORMATS)
    }
    timing = KeyTiming(spec, kernels, dtype, device, timer)
    own, shared = ({name: timing.pair(shape, together) for name, shape in shapes.items()} for together in (False, True))
    sizes = {name: spec.num_layers * shape.bytes_per_token // LAYERS for name, shape in shapes.items()}
    sharing = {name: SHARING[device.type](timing, shape) for name, shape in shapes.items()}
    return replace(
        rough,
        basis="measured",
        layers=layers,
        head=head,
        own_pair={**rough.own_pair, **own},
        shared_pair={**rough.shared_pair, **shared},
        kv_bytes={**rough.kv_bytes, **sizes},
        sharing={**rough.sharing, **sharing},
    )


def _kv_names(dtype: torch.dtype, formats: Mapping[str, object]) -> list[str]:
    own = str(dtype).removeprefix("torch.")
    return [name for name in formats if name == own or name in ("fp8", "int8", "int4")]


@dataclass(frozen=True, slots=True)
class RandomReader:
    """A checkpoint of random numbers."""

    names: Mapping[str, tuple[int, ...]]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.names)

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]:
        for name, shape in self.names.items():
            if name in wanted:
                yield name, DenseTensor(torch.randn(shape) / shape[-1] ** 0.5)

    def digest(self) -> str:
        return "random"


def random_decoder(
    spec: ModelSpec, weights: str, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Two layers and a part of the head, in a weight format."""
    few = min(NUM_LAYERS, spec.num_layers)
    small = replace(
        spec, num_layers=few, windows=spec.windows[:few], vocab_size=min(spec.vocab_size, MOST_OUTPUTS), tied=False
    )
    plan = dense_weights(small)
    reader = RandomReader({name: place.shape for name, place in plan.places.items()})
    parts, _ = load_parts(reader, plan, False, Target(weight_format(weights, kernels, dtype, device), dtype, device))
    rows = partial(kernels.take_rows, parts.vector("embedding"))
    return Decoder(small, parts, parts.linear("head"), kernels, Embedding(rows, dtype, device))


@dataclass(frozen=True, slots=True)
class Timer:
    """Seconds of calls on a device, the fastest of several: what else runs on the machine only makes them slower.

    `check` is called before each measurement, and may end them all.
    """

    device: torch.device
    check: Callable[[], None] = lambda: None

    def __call__(self, call: Callable[[], object]) -> float:
        self.check()
        best, end, rounds, count = float("inf"), time.perf_counter() + LEAST_SECONDS, 0, AT_ONCE[self.device.type]
        while rounds < LEAST_CALLS or time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(count):
                call()
            self._wait()
            best, rounds = min(best, (time.perf_counter() - start) / count), rounds + 1
        return best

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class _Bench:
    """One decoder and how long its parts take."""

    model: Decoder
    kernels: Kernels
    timer: Timer

    @torch.inference_mode()
    def layers(self, num_layers: int) -> Curve:
        """Steps of so many tokens, each of a sequence of its own, with one key to read; executed as in a run."""
        device = self.model.device
        executor = EXECUTORS[device.type]()
        pages = KVPages(self.model.kv_shape(), max(SIZES) + executor.scrap_blocks, BLOCK_SIZE, device)
        times = []
        for count in SIZES:
            batch = _single_tokens(count, self.kernels, device)
            by = executor if count <= MOST_RECORDED else EAGER
            seconds = self.timer(lambda batch=batch, by=by: by.forward(self.model, batch, pages))  # type: ignore[misc]
            times.append(seconds * num_layers / self.model.spec.num_layers)
        return Curve(SIZES, rising(times))

    @torch.inference_mode()
    def head(self, vocabulary: int) -> Curve:
        """Greedy draws from the head, of so many rows."""
        spec, times = self.model.spec, []
        for count in DRAWN:
            hidden = torch.randn(count, spec.hidden_size, dtype=self.model.dtype, device=self.model.device)
            filters = _greedy(count, self.model.device)

            def draw(hidden: torch.Tensor = hidden, filters: Filters = filters) -> object:
                return self.model.draw(hidden, spec.vocab_size, filters)

            times.append(self.timer(draw) * vocabulary / spec.vocab_size)
        return Curve(DRAWN, rising(times))


def _greedy(count: int, device: torch.device) -> Filters:
    zero, one = torch.zeros(count, device=device), torch.ones(count, device=device)
    return Filters(zero, zero.long(), one, zero, torch.zeros(count, 2, dtype=torch.int64, device=device))


def rising(seconds: list[float]) -> tuple[float, ...]:
    """Measured times without the dips that noise makes: more is never faster."""
    return tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist())


def _single_tokens(count: int, kernels: Kernels, device: torch.device) -> Batch:
    items = items_of(np.arange(count)[:, None], 1, np.arange(count + 1), np.zeros(count, np.int64))
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    rows = torch.arange(count, device=device)
    return Batch(zeros, zeros, rows * BLOCK_SIZE, zeros, kernels.plan_attention(items, BLOCK_SIZE), rows)
