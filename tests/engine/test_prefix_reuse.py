"""Prompt tokens computed against the number of distinct prefix tokens, on real prompts and for any KV memory."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from demo_model import demo_model_path
from scheduling import Bounds, CountingModel, distinct_prefix_tokens, drive

from batchgen.engine.engine import in_plan_order
from batchgen.engine.request import Request, Sampling
from batchgen.engine.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16
FEW_SHOT = "".join(
    f"Name: {name}\nDocumentation: {text}\nAnswer: {answer}\n\n"
    for name, text, answer in [
        ("json.dumps", "Serialize obj to a JSON formatted str. " * 8, "Turns an object into JSON text. Category: text"),
        (
            "threading.Lock",
            "A lock object is a synchronization primitive. " * 8,
            "One thread at a time. Category: concurrency",
        ),
        (
            "math.gcd",
            "Greatest Common Divisor of the integer arguments. " * 8,
            "Largest common divisor. Category: math",
        ),
    ]
)


def mmlu() -> list[str]:
    table = pq.read_table(ROOT / "tests/data/mmlu-cot.parquet")
    prompts = [a + b for a, b in zip(table["examples"].to_pylist(), table["question"].to_pylist(), strict=True)]
    random.Random(20).shuffle(prompts)
    return prompts


def label() -> list[str]:
    table = pq.read_table(ROOT / "examples/annotate-docs/data/api-docs.parquet").slice(0, 256)
    names, docs = table["name"].to_pylist(), table["doc"].to_pylist()
    return [f"{FEW_SHOT}Name: {name}\nDocumentation: {doc}\nAnswer:" for name, doc in zip(names, docs, strict=True)]


@pytest.fixture(scope="module")
def tokenised():
    tokenizer = load_tokenizer(str(demo_model_path()))
    return {make.__name__: tokenizer.encode(make(), True) for make in (mmlu, label)}


@pytest.mark.parametrize(("name", "max_tokens"), [("mmlu", 8), ("label", 32)])
@pytest.mark.parametrize("memory", [1.0, 1.5, 3.0, 20.0])  # times the longest request
@pytest.mark.parametrize("max_batch_tokens", [256, 4096])
def test_every_distinct_prefix_token_is_computed_once(tokenised, name, max_tokens, memory, max_batch_tokens):
    prompts = tokenised[name]
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    requests = [Request(key, prompt, sampling) for key, prompt in enumerate(prompts)]
    longest = -(-max(len(prompt) + max_tokens for prompt in prompts) // BLOCK)
    num_blocks = int(longest * memory)
    finished, statistics = drive(
        in_plan_order(requests),
        bounds=Bounds(num_blocks * BLOCK, vocabulary=49_152),
        num_blocks=num_blocks,
        block_size=BLOCK,
        budget=max_batch_tokens,
        max_sequences=256,
        model=CountingModel(),
        check=False,
    )
    assert all(completion.error is None for completion in finished)
    assert len(finished) == len(prompts)
    assert statistics.computed_prompt_tokens <= 1.02 * distinct_prefix_tokens(prompts)
    assert statistics.computed_prompt_tokens < 0.6 * sum(map(len, prompts))
