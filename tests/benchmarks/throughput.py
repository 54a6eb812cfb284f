"""Rows per second of the engine beside transformers' batched `generate`, same model, same tokens, one run.

    .venv/bin/python tests/benchmarks/throughput.py [--workload label | --prompts FILE.jsonl] [--rows 256]
        [--peer-rows 64] [--dtype bfloat16] [--weights int4]

A prompts file holds one JSON object per line with `prompt`, `max_tokens` and optionally `n` and `temperature`. End
tokens are ignored, so both make the same number of tokens. Prints one JSON line. Run it with nothing else running.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from demo_model import demo_model_path, demo_reference
from scheduling import distinct_prefix_tokens
from workloads import WORKLOADS

from batchgen.engine import Engine, Request, Sampling

PEER_BATCH = 16
PARAMETERS, HEAD = 134.5e6, 28.3e6  # of SmolLM2-135M, and of its output head
PAIR_FLOP = 69_120  # attention work per (query, key)


def read_rows(args: argparse.Namespace) -> list[dict]:
    if args.prompts:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.rows]
        return [json.loads(line) for line in lines]
    make, max_tokens = WORKLOADS[args.workload]
    return [{"prompt": prompt, "max_tokens": max_tokens} for prompt in make(args.rows)]


def ours(engine: Engine, prompts: list[list[int]], rows: list[dict]) -> dict:
    requests = [
        Request(
            key,
            prompt,
            Sampling(
                max_tokens=row["max_tokens"],
                n=row.get("n", 1),
                temperature=row.get("temperature", 0.0),
                ignore_eos=True,
            ),
        )
        for key, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    start = time.perf_counter()
    finished = list(engine.run(requests))
    seconds = time.perf_counter() - start
    assert len(finished) == len(rows)
    assert all(completion.error is None for completion in finished)
    statistics = engine.statistics
    return {
        "rows_per_s": round(len(rows) / seconds, 3),
        "run_s": round(seconds, 2),
        "computed_prompt_tokens": statistics.computed_prompt_tokens,
        "computed_over_distinct": round(statistics.computed_prompt_tokens / distinct_prefix_tokens(prompts), 4),
        "output_tokens": statistics.output_tokens,
        "preemptions": statistics.preemptions,
        "steps": statistics.steps,
        "kv_peak_share": round(statistics.kv_blocks_peak / statistics.kv_blocks_total, 3),
    }


@torch.inference_mode()
def transformers_generate(prompts: list[list[int]], rows: list[dict], dtype: torch.dtype) -> dict:
    """Sorted by length, left-padded batches: what a careful user writes."""
    model = demo_reference().to(dtype)
    order = sorted(range(len(rows)), key=lambda index: len(prompts[index]))
    start = time.perf_counter()
    for first in range(0, len(order), PEER_BATCH):
        chosen = order[first : first + PEER_BATCH]
        longest = max(len(prompts[index]) for index in chosen)
        tokens = torch.tensor([[2] * (longest - len(prompts[index])) + prompts[index] for index in chosen])
        mask = torch.tensor([[0] * (longest - len(prompts[index])) + [1] * len(prompts[index]) for index in chosen])
        row = rows[chosen[0]]
        sampled = row.get("temperature", 0.0) > 0
        model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=row["max_tokens"],
            min_new_tokens=row["max_tokens"],
            num_return_sequences=row.get("n", 1),
            do_sample=sampled,
            **({"temperature": row["temperature"]} if sampled else {}),
            pad_token_id=2,
        )
    seconds = time.perf_counter() - start
    return {"rows_per_s": round(len(rows) / seconds, 3), "run_s": round(seconds, 2), "rows": len(rows)}


def gemm_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this machine."""
    x, w = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return 2 * 1024 * 2048 * 2048 / best


def bound(prompts: list[list[int]], rows: list[dict], rate: float) -> float:
    """Rows per second when every distinct token costs its matrix products and attention, at the GEMM rate."""
    flop = 2 * (PARAMETERS - HEAD) * distinct_prefix_tokens(prompts)
    for prompt, row in zip(prompts, rows, strict=True):
        answer = row["max_tokens"] * row.get("n", 1)
        flop += 2 * HEAD + answer * (2 * PARAMETERS + PAIR_FLOP * (len(prompt) + row["max_tokens"] / 2))
    return len(rows) / (flop / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="label")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--peer-rows", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--weights", choices=("native", "int8", "int4"), default="native")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)

    start = time.perf_counter()
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype=args.dtype, weights=args.weights)
    load = time.perf_counter() - start
    rows = read_rows(args)
    prompts = engine.tokenizer.encode([row["prompt"] for row in rows], add_special_tokens=True)
    list(engine.run([Request(0, prompts[0][:32], Sampling(max_tokens=2))]))  # first calls set up thread pools
    own = ours(engine, prompts, rows)
    peer = transformers_generate(prompts[: args.peer_rows], rows[: args.peer_rows], dtype)
    limit = bound(prompts, rows, gemm_rate(dtype))
    result = {
        "workload": str(args.prompts or args.workload),
        "rows": len(rows),
        "dtype": args.dtype,
        "weights": args.weights,
        "threads": torch.get_num_threads(),
        "load_s": round(load, 2),
        "batchgen": own,
        "transformers": peer,
        "ratio": round(own["rows_per_s"] / peer["rows_per_s"], 2),
        "share_of_gemm_bound": round(own["rows_per_s"] / limit, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
