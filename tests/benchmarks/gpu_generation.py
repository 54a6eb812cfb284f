"""Generation end to end beside the sequential roofline: decoding at a batch, prompts, a shared prefix, fixed shapes.

Random weights in the shape of a model, or a real checkpoint; rows are token ids. The bounds are those of roofline.py's
formulas with the limits measured in the same run.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_kernels import Limits
from gpu_results import Budget
from random_model import random_ids
from roofline import size_of

from batchgen.engine import Engine, Request, Sampling
from batchgen.engine.draft.speculation import NO_SPECULATION
from batchgen.engine.loop import StepLoop
from batchgen.engine.request import Completion
from batchgen.engine.sequence import Drawn, Feed, Sequence, Step, Task
from batchgen.engine.stopping import NoStops
from batchgen.engine.token_counts import NoCounts

FORMATS = (  # name, weights, KV cache
    ("8B native, KV bfloat16", "native", "bfloat16"),
    ("8B fp8, KV fp8", "fp8", "fp8"),
    ("8B int4, KV fp8", "int4", "fp8"),
)
FINITE, SCALE = 112, 0.02  # 8-bit floats below are numbers, up to 120; what codes are times
WEIGHT_BYTES = {"native": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is run: rows and lengths of each workload."""

    batches: tuple[int, ...] = (512, 64, 256, 1024)
    context: int = 1024
    steps: int = 40
    prompt: int = 2048
    prompts: int = 16
    shared: tuple[int, int, int] = (2000, 100, 50)
    shared_rows: tuple[int, int] = (1024, 64)  # with sharing, and without
    fixed: tuple[tuple[int, int, int], ...] = ((128, 128, 2048), (1000, 1000, 256), (2048, 128, 256))  # in, out, rows


SMOKE = Sizes((2, 3), 20, 4, 30, 2, (24, 4, 3), (4, 3), ((5, 4, 3),))


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds that a model in its formats takes at least, kernel after kernel."""

    engine: Engine
    limits: Limits
    weights: str

    @property
    def flops(self) -> float:
        """Of 4-bit codes too, which meet activations as 8-bit floats where the chip has them."""
        return self.limits.fp8 if self.weights in ("fp8", "int4") and self.limits.fp8 else self.limits.bfloat16

    def decode(self, batch: int, context: float) -> float:
        """A step of `batch` answers with `context` tokens each."""
        size, n = self._size(), self._size().weights
        read = n * WEIGHT_BYTES[self.weights] / self.limits.bandwidth
        return max(2 * n * batch / self.flops, read) + batch * context * self._key(size)

    def prefill(self, length: int, behind: int = 0) -> float:
        size = self._size()
        pairs = length * behind + length * length / 2
        return (2 * size.layers * length + 2 * size.head) / self.flops + size.pair * pairs / self.limits.bfloat16

    def rows(self, prompt: int, answer: int, rows: int, shared: int = 0) -> float:
        """All rows: prompts of which `shared` tokens are computed once, then answers, as many at once as are let in.

        What is shared is read once for all rows of a step.
        """
        batch = min(
            rows, self.engine._max_sequences, max(1, self.engine.bounds.kv_tokens // (prompt - shared + answer))
        )
        size = self._size()
        token = self.decode(batch, prompt - shared + answer / 2) / batch
        if shared:
            kv = self._kv_bytes()
            token += max(shared * kv / (batch * self.limits.bandwidth), shared * size.pair / self.limits.bfloat16)
        once = self.prefill(shared) if shared else 0.0
        return once + rows * (self.prefill(prompt - shared, shared) + (answer - 1) * token)

    def _key(self, size: Any) -> float:
        return max(self._kv_bytes() / self.limits.bandwidth, size.pair / self.limits.bfloat16)

    def _kv_bytes(self) -> float:
        return self.engine._runner.pages.shape.bytes_per_token

    def _size(self) -> Any:
        return size_of(self.engine.model.spec)


@dataclass
class Steady:
    """A scheduler of sequences that all decode, none of which ends: what a step takes at one batch and context."""

    sequences: list[Sequence]
    steps: int
    taken: list[float] = field(default_factory=list)

    def schedule(self) -> Step | None:
        if not self.steps:
            return None
        self.steps -= 1
        return Step([], [Feed(sequence, sequence.computed, 1) for sequence in self.sequences])

    def launched(self, step: Step) -> None:
        for sequence in self.sequences:
            sequence.computed += 1
            sequence.foreseen += 1

    def commit(self, step: Step, drawn: list[list[Drawn]]) -> None:
        for sequence, (one,) in zip(self.sequences, drawn, strict=True):
            sequence.tokens.append(max(0, one.token))
            sequence.foreseen -= 1
        self.taken.append(time.perf_counter())

    def take_finished(self) -> Iterator[Completion]:
        return iter(())


def steady(engine: Engine, batch: int, context: int, steps: int) -> Steady | None:
    """None where the KV memory does not hold them."""
    size = engine.settings.tokens_per_block
    each = -(-(context + steps + 1) // size)
    if batch * each > engine._num_blocks or batch > engine._max_batch_tokens:
        return None
    sampling = Sampling(max_tokens=steps + 1, temperature=0, ignore_eos=True)
    sequences = []
    for row in range(batch):
        prompt = random_ids(context, 0, engine.bounds.vocabulary)
        task = Task(Request(row, prompt, sampling), prompt, 0, frozenset(), [None])
        sequence = Sequence(task, 0, list(prompt), NoStops(), NoCounts(), computed=context - 1)
        for block in range(row * each, (row + 1) * each):
            sequence.add_block(block)
        sequences.append(sequence)
    return Steady(sequences, steps)


def draw_keys(engine: Engine) -> None:
    """Random numbers in all pages, which begin as zeros: products of zeros let a device run faster than it will."""
    pages = engine._runner.pages
    layers = [pages.layer(index) for index in range(pages.shape.num_layers)]
    for stored in (side for layer in layers for side in (layer.keys, layer.values)):
        if stored.codes.itemsize == 1:
            stored.codes.view(torch.uint8).random_(0, FINITE)
        else:
            stored.codes.normal_()
        stored.scales.fill_(SCALE)


def decode(engine: Engine, bound: Roofline, batch: int, sizes: Sizes) -> dict[str, Any]:
    scheduler = steady(engine, batch, sizes.context, sizes.steps)
    if scheduler is None:
        return {"skipped": f"{engine.bounds.kv_tokens} tokens of KV do not hold the batch"}
    loop = StepLoop(scheduler, engine._runner.launch, NO_SPECULATION, engine._look_ahead)  # type: ignore[arg-type]
    list(loop.run(lambda: False, lambda: True))
    tail = scheduler.taken[-max(3, sizes.steps // 2) :]  # behind the first, which compile and record
    step = (tail[-1] - tail[0]) / (len(tail) - 1)
    least = bound.decode(batch, sizes.context + sizes.steps)
    return {"tok/s": batch / step, "ms": step * 1e3, "bound_tok/s": batch / least, "of_roofline": least / step}


def jobs(engine: Engine, bound: Roofline, prompts: list[tuple[int, ...]], answer: int, shared: int) -> dict[str, Any]:
    """Rows through the whole engine; a few first, so that nothing is compiled while the clock runs."""
    sampling = Sampling(max_tokens=answer, temperature=0, ignore_eos=True)
    rows = [Request(key, list(prompt), sampling) for key, prompt in enumerate(prompts)]
    few = Sampling(max_tokens=min(answer, 6), temperature=0, ignore_eos=True)
    list(engine.run([Request(key, list(prompt[::-1]), few) for key, prompt in enumerate(prompts[:64])]))
    began = time.perf_counter()
    done = list(engine.run(rows))
    took = time.perf_counter() - began
    failed = sum(completion.error is not None for completion in done)
    least = bound.rows(len(prompts[0]), answer, len(rows), shared)
    return {
        "ok": failed == 0 and len(done) == len(rows),
        "rows/s": len(rows) / took,
        "prompt_tok/s": sum(map(len, prompts)) / took,
        "output_tok/s": answer * len(rows) / took,
        "bound_rows/s": len(rows) / least,
        "of_roofline": least / took,
        "s": took,
    }


def prompts_of(engine: Engine, length: int, rows: int, shared: int = 0) -> list[tuple[int, ...]]:
    vocabulary = engine.bounds.vocabulary
    start = random_ids(shared, 7, vocabulary) if shared else ()
    return [start + random_ids(length - shared, 100 + row, vocabulary) for row in range(rows)]


def run_workloads(budget: Budget, name: str, engine: Engine, bound: Roofline, sizes: Sizes) -> None:
    """Every workload of one model, those that the targets speak of first."""
    resolved: Mapping[str, Any] = engine.resolved
    budget.results.add(budget.part, f"{name}: engine", kv_tokens=engine.bounds.kv_tokens, kv=resolved["kv_cache"])
    draw_keys(engine)
    for batch in sizes.batches:
        least = sizes.steps * bound.decode(batch, sizes.context)
        title = f"{name}: decode {batch} at {sizes.context}"
        budget.measure(title, 4 + 3 * least, lambda batch=batch: decode(engine, bound, batch, sizes))
    _jobs(budget, f"{name}: prefill {sizes.prompt}", engine, bound, (sizes.prompt, 1, sizes.prompts), 0)
    shared, own, answer = sizes.shared
    title = f"{name}: {shared} shared + {own} + {answer}"
    _jobs(budget, title, engine, bound, (shared + own, answer, sizes.shared_rows[0]), shared)
    engine.settings = engine.settings.model_copy(update={"prefix_sharing": False})
    _jobs(budget, f"{title}, sharing off", engine, bound, (shared + own, answer, sizes.shared_rows[1]), 0, shared)
    engine.settings = engine.settings.model_copy(update={"prefix_sharing": True})
    for prompt, answer, rows in sizes.fixed:
        _jobs(budget, f"{name}: {prompt}/{answer}", engine, bound, (prompt, answer, rows), 0)


def _jobs(
    budget: Budget,
    title: str,
    engine: Engine,
    bound: Roofline,
    shape: tuple[int, int, int],
    shared: int,
    alike: int = 0,
) -> None:
    """`shape`: prompt, answer, rows. `alike`: tokens that prompts have in common although nothing is shared."""
    prompt, answer, rows = shape
    prompts = prompts_of(engine, prompt, rows, shared or alike)
    expected = 3 + 2 * bound.rows(prompt, answer, rows, shared)
    budget.measure(title, expected, lambda: jobs(engine, bound, prompts, answer, shared))


def free(device: torch.device) -> None:
    """Memory of an engine that is gone goes back, so that the next one sees it."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
