"""Which way each quantised product of a model, and its attention, is fastest on this device: every candidate timed.

Knows shapes of a model and seconds; what a choice means, and which there are, is the kernels' business.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch

from ..kernels import Kernels
from ..kernels.attention import AttentionItems, Masking
from ..kernels.attention.gpu_choice import TileKey, tile_candidates
from ..kernels.chip import chip_of
from ..kernels.grouped.choice import candidates
from ..kernels.grouped.layout import SYMMETRIC_ZERO
from ..kernels.kv_format import FORMATS
from ..kernels.linear_fp8 import Fp8Weight
from ..kernels.linear_int4 import Int4Weight
from ..kernels.linear_int8 import Int8Weight
from ..kernels.tuned import AnyChoice, AnyKey
from .kv import KVPages, KVShape
from .spec import ModelSpec
from .weights.formats import HEAD

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # of steps: decoding at few rows up to a full prompt chunk
DECODE, CONTEXT, PROMPT = 64, 1024, 2048  # rows and keys of a step that decodes; a prompt
BLOCK_SIZE = 16
INT4_GROUPS = (128, 32)  # of packed checkpoints, and of GGUF blocks
HEAD_FORMATS = {"int4": "int8", "fp8": "int8"}  # where the head is held in another than the layers
REPEATS = 15
COLD_BYTES = 128 * 2**20  # of copies of a weight, beyond what caches keep of it
AHEAD_CYCLES = 20_000_000  # about 10 ms: the host queues all repeats in it
BETTER = 0.97  # of the built-in choice's time, below which another is taken

Timer = Callable[[Callable[[], object]], float]  # seconds of a call


class Trial(dict[AnyKey, AnyChoice]):
    """The choices that kernels ask for while they are tried; remembers what was asked last."""

    asked: AnyKey | None = None

    def reset(self) -> None:
        """Back to the built-in choices."""
        self.clear()
        self.asked = None

    def get(self, key: AnyKey, default: AnyChoice | None = None) -> AnyChoice | None:  # type: ignore[override]
        self.asked = key
        return super().get(key, default)


@dataclass(frozen=True, slots=True)
class Product:
    """One linear of a model in one format, or its attention: `run` computes for so many tokens, one of `sizes`."""

    title: str
    run: Callable[[int], object]
    sizes: tuple[int, ...] = TOKENS


def tune(
    products: Sequence[Product], trial: Trial, timer: Timer, deadline: float, told: Callable[[str], None]
) -> dict[AnyKey, tuple[AnyChoice, float]]:
    """For every product and number of tokens the fastest choice and its seconds, where it is not the built-in one.

    `trial` is what the products' kernels take choices from. Ends at `deadline` (perf_counter) with what it has.
    """
    found: dict[AnyKey, tuple[AnyChoice, float]] = {}
    plan = [(tokens, product) for tokens in TOKENS for product in products if tokens in product.sizes]
    for place, (tokens, product) in enumerate(plan):
        if time.perf_counter() > deadline:
            told(f"time is up: {len(plan) - place} of {len(plan)} left out, they go by the built-in table")
            break
        best = _tune_one(product, tokens, trial, timer, deadline)
        if best is not None:
            key, choice, seconds, before = best
            found[key] = choice, seconds
            gain = f"{before * 1e6:.1f} to {seconds * 1e6:.1f} us by {choice}"
            told(f"[{place + 1}/{len(plan)}] {product.title}, {tokens} tokens: {gain}")
        else:
            told(f"[{place + 1}/{len(plan)}] {product.title}, {tokens} tokens: as built in")
    return found


def _tune_one(
    product: Product, tokens: int, trial: Trial, timer: Timer, deadline: float
) -> tuple[AnyKey, AnyChoice, float, float] | None:
    """Key, choice, its seconds and those of the built-in; None when that one is best, or nothing was asked."""
    trial.reset()
    before = timer(lambda: product.run(tokens))
    key = trial.asked
    if key is None:
        return None
    timed: list[tuple[float, int, AnyChoice]] = []
    tried: Iterable[AnyChoice] = tile_candidates(key) if isinstance(key, TileKey) else candidates(key.table, tokens)
    for choice in tried:
        if time.perf_counter() > deadline:
            break
        trial[key] = choice
        try:
            timed.append((timer(lambda: product.run(tokens)), len(timed), choice))
        except (RuntimeError, ValueError):  # a tile that this device has no room for
            continue
    trial.clear()
    if not timed or min(timed)[0] > BETTER * before:
        return None
    seconds, _, choice = min(timed)
    return key, choice, seconds, before


def products_of(
    spec: ModelSpec, formats: Sequence[str], kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> Iterator[Product]:
    """The linears of a layer and the head as each weight format holds them, with random numbers, one per shape."""
    shapes = shapes_of(spec)
    x = {
        inputs: torch.randn(max(TOKENS), inputs, dtype=dtype, device=device)
        for inputs in {inputs for _, inputs in shapes.values()}
    }
    for name, part in dict.fromkeys((_held_as(name, part), part) for name in formats for part in shapes):
        outputs, inputs = shapes[part]
        result = torch.float32 if part == HEAD else dtype
        for same in zip(*(_MADE[name](outputs, inputs, device) for _ in range(_copies(outputs * inputs))), strict=True):
            title, runs = same[0][0], cycle([_runner(kernels, weight, x[inputs], result) for _, weight in same])
            run = partial(_next_run, runs)
            yield Product(f"{name}{title} {part} {outputs} x {inputs}", run)


def _copies(num_bytes: int) -> int:
    """How many copies of a weight take turns, as the layers of a model do."""
    return max(1, min(REPEATS, -(-COLD_BYTES // num_bytes)))


def _next_run(runs: Iterator[Callable[[int], object]], tokens: int) -> object:
    return next(runs)(tokens)


def _held_as(name: str, part: str) -> str:
    return HEAD_FORMATS.get(name, name) if part == HEAD else name


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear, equal shapes once."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shapes = {
        "qkv": (heads, spec.hidden_size),
        "output": (spec.hidden_size, spec.num_heads * spec.head_dim),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        HEAD: (spec.vocab_size, spec.hidden_size),
    }
    return {part: shape for at, (part, shape) in enumerate(shapes.items()) if shape not in list(shapes.values())[:at]}


def _int4(outputs: int, inputs: int, device: torch.device) -> Iterator[tuple[str, Int4Weight]]:
    for group in INT4_GROUPS:
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
        scale = torch.ones(outputs, -(-inputs // group), dtype=torch.float16, device=device)
        yield f" in groups of {group}", Int4Weight(codes, scale, -SYMMETRIC_ZERO * scale, group)
        yield f" in groups of {group} with a minimum", Int4Weight(codes, scale, scale, group)


def _int8(outputs: int, inputs: int, device: torch.device) -> Iterator[tuple[str, Int8Weight]]:
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
    yield "", Int8Weight(codes, torch.ones(outputs, 1, device=device), None, inputs)


def _fp8(outputs: int, inputs: int, device: torch.device) -> Iterator[tuple[str, Fp8Weight]]:
    codes = torch.randn(outputs, inputs, dtype=torch.float16, device=device).to(torch.float8_e4m3fn)
    yield "", Fp8Weight(codes, torch.ones(outputs, 1, device=device), inputs)


_MADE: Mapping[str, Callable[[int, int, torch.device], Iterator[tuple[str, Int4Weight | Int8Weight | Fp8Weight]]]]
_MADE = {"int4": _int4, "int8": _int8, "fp8": _fp8}


def _runner(
    kernels: Kernels, weight: Int4Weight | Int8Weight | Fp8Weight, x: torch.Tensor, dtype: torch.dtype
) -> Callable[[int], object]:
    if isinstance(weight, Int4Weight):
        packed, linear = kernels.pack_int4(weight), kernels.linear_int4
    elif isinstance(weight, Int8Weight):
        packed, linear = kernels.pack_int8(weight), kernels.linear_int8
    else:
        packed, linear = kernels.pack_fp8(weight), kernels.linear_fp8
    return lambda tokens: linear(x[:tokens], packed, None, dtype)


def attention_of(
    spec: ModelSpec, caches: Sequence[str], kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> Iterator[Product]:
    """A layer's attention over pages of each KV format: rows that decode, and a prompt, each in a step of its own."""
    for name in caches:
        for title, rows, queries, keys in (("decode", DECODE, 1, CONTEXT), ("prompt", 1, PROMPT, PROMPT)):
            plan = kernels.plan_attention(_items(rows, queries, keys), BLOCK_SIZE)
            shape = KVShape(1, spec.num_kv_heads, spec.head_dim, FORMATS[name])
            layer = KVPages(shape, rows * keys // BLOCK_SIZE, BLOCK_SIZE, device).layer(0)
            query = torch.randn(rows * queries, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
            run = partial(kernels.attention, query, layer, plan, Masking(spec.attention_scale))
            yield Product(f"attention, KV {name}, {title}", partial(_of_tokens, run), (rows * queries,))


def _items(rows: int, queries: int, keys: int) -> AttentionItems:
    """Rows of as many keys, whose last tokens attend."""
    blocks = keys // BLOCK_SIZE
    return AttentionItems(
        start=np.zeros(rows, np.int64),
        length=np.full(rows, keys),
        block_offset=np.arange(rows + 1) * blocks,
        blocks=np.random.default_rng(0).permutation(rows * blocks),
        query_offset=np.arange(rows + 1) * queries,
        queries=np.arange(rows * queries),
        positions=np.tile(np.arange(keys - queries, keys), rows),
    )


def _of_tokens(run: Callable[[], object], tokens: int) -> object:
    return run()


def tune_device(
    spec: ModelSpec,
    formats: Sequence[str],
    caches: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    told: Callable[[str], None],
) -> dict[AnyKey, tuple[AnyChoice, float]]:
    """The same for the linears and the attention of a model on the current CUDA device."""
    from ..kernels.gpu_table import GpuKernels

    deadline, trial = time.perf_counter() + seconds, Trial()
    with torch.inference_mode():
        kernels = GpuKernels(chip_of(device), trial)
        products = list(products_of(spec, formats, kernels, dtype, device))
        products += attention_of(spec, caches, kernels, dtype, device)
        return tune(products, trial, median_seconds, deadline, told)


def median_seconds(call: Callable[[], object]) -> float:
    """Of some calls on the current CUDA device, after one that compiles; the host's launches take no part in it.

    Raises RuntimeError for what the device has no room for.
    """
    from triton.errors import TritonError

    try:
        call()
    except TritonError as error:  # no RuntimeError by itself
        raise RuntimeError(str(error)) from error
    # Steps are replayed from recordings, which have no gaps between launches either.
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    timed = partial(torch.cuda.Event, enable_timing=True)
    events = [(timed(), timed()) for _ in range(REPEATS)]
    for before, behind in events:
        before.record()
        call()
        behind.record()
    torch.cuda.synchronize()
    return float(sorted(before.elapsed_time(behind) for before, behind in events)[REPEATS // 2]) / 1e3
