"""SmolLM2 on real documentation: greedy float32 is token for token what transformers gives, whatever the limits."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from demo_model import demo_model_path, demo_reference

from batchgen.engine import Engine, Request, Sampling

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, MAX_TOKENS, TIE = 32, 16, 1e-4
INSTRUCTION = "Read the documentation of a Python object and say in one short sentence what it is for.\n\n"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    table = pq.read_table(ROOT / "examples/annotate-docs/data/api-docs.parquet").slice(0, NUM_ROWS)
    rows = zip(table["name"].to_pylist(), table["doc"].to_pylist(), strict=True)
    texts = [f"{INSTRUCTION}{name}: {doc[:500]}\nIt" for name, doc in rows]
    return Engine.load(str(demo_model_path()), device="cpu", dtype="float32", memory="1MiB").tokenizer.encode(
        texts, True
    )


@pytest.fixture(scope="module")
@torch.no_grad()
def expected(prompts) -> list[list[int]]:
    model = demo_reference()
    answers = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=2,
            pad_token_id=2,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@torch.no_grad()
def is_tie(prompt: list[int], answer: list[int], expected: list[int]) -> bool:
    """The two best logits of the reference at the first difference are closer than TIE."""
    first = next(i for i, (left, right) in enumerate(zip(answer, expected, strict=False)) if left != right)
    logits = demo_reference()(torch.tensor([prompt + expected[:first]])).logits[0, -1]
    best = logits.topk(2).values
    return float(best[0] - best[1]) < TIE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"block_size": 16, "max_batch_tokens": 4096}, 400),
        ({"block_size": 8, "max_batch_tokens": 256, "max_sequences": 64}, 60),
        ({"block_size": 32, "max_batch_tokens": 256, "prefix_sharing": False}, 400),
        ({"block_size": 16, "max_batch_tokens": 16}, 400),
    ],
    ids=["one batch", "little memory", "unshared", "small steps"],
)
def test_greedy_equals_transformers(prompts, expected, settings, num_blocks):
    memory = 46_080 * settings["block_size"] * num_blocks
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype="float32", memory=memory, **settings)
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0)
    requests = [Request(key, prompt, sampling) for key, prompt in enumerate(prompts)]
    random.Random(num_blocks).shuffle(requests)
    answers = {completion.key: completion.tokens for completion in engine.run(requests)}
    for key, prompt in enumerate(prompts):
        assert answers[key] == expected[key] or is_tie(prompt, answers[key], expected[key]), key
    assert sum(answers[key] == expected[key] for key in answers) >= NUM_ROWS - 1
