"""Prompt tokens computed against the number of distinct prefix tokens, on real prompts and for any KV memory."""

import pytest
from demo_model import demo_model_path
from scheduling import Bounds, CountingModel, distinct_prefix_tokens, drive
from workloads import WORKLOADS

from batchgen.engine.request import Request, Sampling
from batchgen.engine.tokenizer import load_tokenizer
from batchgen.engine.workload import arrange

BLOCK = 16


@pytest.fixture(scope="module")
def tokenised():
    tokenizer = load_tokenizer(str(demo_model_path()))
    return {name: tokenizer.encode(make(285), True) for name, (make, _) in WORKLOADS.items()}


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("memory", [1.0, 1.5, 3.0, 20.0])  # times the longest request
@pytest.mark.parametrize("max_batch_tokens", [256, 4096])
def test_every_distinct_prefix_token_is_computed_once(tokenised, name, memory, max_batch_tokens):
    prompts, (_, max_tokens) = tokenised[name], WORKLOADS[name]
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    requests = [Request(key, prompt, sampling) for key, prompt in enumerate(prompts)]
    longest = -(-max(len(prompt) + max_tokens for prompt in prompts) // BLOCK)
    num_blocks = int(longest * memory)
    bounds = Bounds(num_blocks * BLOCK, vocabulary=49_152)
    finished, statistics = drive(
        arrange(requests, bounds, 256)[0],
        bounds=bounds,
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
