"""Runs rows of token ids through batchgen and prints one JSON line. Knows the protocol of measure.py, no workload.

    python batchgen_rows.py ROWS.jsonl '{"model": PATH, "weights": "int4", ...}'

Options beyond those of `Engine.load`: `kernels: reference` computes with the PyTorch references, `shared_items: false`
reads a shared prefix once for every row, `ordered: false` takes the rows in the order of the file, `top` asks for
log-probabilities of so many tokens.
"""

import math
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from protocol import read_call, write_result
from torch import Tensor

from batchgen.engine import Engine, Request, Sampling
from batchgen.engine.costs import predict
from batchgen.engine.options import DEFAULT
from batchgen.engine.profile import workload_of
from batchgen.engine.rates import built_in
from batchgen.engine.sharing import Sharing
from batchgen.kernels.linear_int4 import Int4Weight
from batchgen.kernels.linear_int8 import Int8Weight
from batchgen.kernels.panels import segment_of
from batchgen.kernels.panels.reference import linear, turned, turned_back
from batchgen.kernels.tables import TABLES, ReferenceKernels


@dataclass(frozen=True, slots=True)
class Expanded:
    """A quantised weight as its numbers, [O, H] float32, turned if it is, and inputs to a scale of the activations."""

    numbers: Tensor
    segment: int
    turned: bool = False
    balance: Tensor | None = None

    def values(self, rows: Tensor) -> Tensor:
        return turned_back(self.numbers[rows], self.balance) if self.turned else self.numbers[rows]


class ExpandedReference(ReferenceKernels):
    """The references; a quantised weight is expanded once at load rather than at every product."""

    def pack_int8(self, weight: Int8Weight) -> Expanded:
        segment = segment_of(weight.group, weight.shape[1], weight.turned)
        return Expanded(replace(weight, turned=False).values(), segment, weight.turned, weight.balance)

    def pack_int4(self, weight: Int4Weight) -> Expanded:
        return Expanded(weight.values(), segment_of(weight.group, weight.shape[1]))

    def linear_int8(self, x: Tensor, weight: Expanded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return linear(turned(x, weight.balance) if weight.turned else x, weight.numbers, bias, weight.segment, dtype)

    linear_int4 = linear_int8


def load(options: dict[str, Any]) -> tuple[Engine, int | None]:
    """The engine, and how many log-probabilities are wanted."""
    top = options.pop("top", None)
    if options.pop("kernels", "native") == "reference":
        TABLES["cpu"] = lambda number: ExpandedReference()
    together = options.pop("shared_items", True)
    engine = Engine.load(options.pop("model"), device="cpu", **options)
    if not together:
        engine._runner.sharing = Sharing(key=math.inf, read=math.inf, result=math.inf)
    return engine, top


def requests(rows: list[dict[str, Any]], top: int | None) -> list[Request]:
    return [
        Request(
            key,
            row["tokens"],
            Sampling(
                max_tokens=row["max_tokens"], n=row["n"], temperature=row["temperature"], ignore_eos=True, logprobs=top
            ),
        )
        for key, row in enumerate(rows)
    ]


def expected_tokens(engine: Engine, asked: list[Request]) -> float:
    """Of keys and values that the rows hold at once."""
    limits = {name: engine.resolved[name] for name in ("max_batch_tokens", "max_sequences", "block_size")}
    rates = built_in(engine.model.spec, engine.resolved["dtype"])
    return predict(workload_of(asked, len(asked)), replace(DEFAULT, **limits), rates, engine.bounds.kv_tokens).kv_tokens


def main() -> None:
    rows, options = read_call(sys.argv)
    ordered = options.pop("ordered", True)
    engine, top = load(options)
    list(engine.run([Request(0, rows[0]["tokens"][:32], Sampling(max_tokens=2))]))  # first calls set up thread pools
    asked = requests(rows, top)
    engine.prepare(expected_tokens(engine, asked)).join()
    start, first, completions = time.time(), 0.0, []
    for completion in engine.run(asked if ordered else iter(asked)):
        first = first or time.time()
        completions.append(completion)
    end = time.time()
    completions.sort(key=lambda completion: completion.key)
    faults = [str(completion.error) for completion in completions if completion.error is not None]
    if faults or len(completions) != len(rows):
        raise SystemExit(f"{len(completions)} of {len(rows)} rows, {len(faults)} with errors {faults[:1]}")
    statistics = engine.statistics
    write_result(
        start=start,
        first=first,
        end=end,
        computed_prompt_tokens=statistics.computed_prompt_tokens,
        steps=statistics.steps,
        answers=[[sample.tokens for sample in completion.samples] for completion in completions],
        tops=[[entry.top for entry in completion.samples[0].logprobs or ()] for completion in completions],
        settings=engine.resolved,
    )


if __name__ == "__main__":
    main()
