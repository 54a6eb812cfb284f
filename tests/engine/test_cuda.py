"""The engine on a CUDA device beside the CPU, in float32: run where there is one."""

import pytest
import tiny
import torch

from batchgen.engine import Engine, Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_every_family_gives_the_cpu_s_tokens(family, tmp_path):
    folder = tiny.tiny_model(family, tmp_path)
    start = tiny.random_prompt(37, seed=1)
    prompts = [start + tiny.random_prompt(3 + i, seed=10 + i) for i in range(8)] + [[9]]
    samplings = Sampling(max_tokens=24, temperature=0), Sampling(max_tokens=24, temperature=0.9, top_p=0.9, n=2)
    requests = [Request(key, prompt, samplings[key % 2]) for key, prompt in enumerate(prompts)]
    found = []
    for device in ("cpu", "cuda"):
        engine = Engine.load(str(folder), device=device, dtype="float32", memory="64MiB", speculation="off")
        found.append({done.key: done.tokens for done in engine.run(requests)})
    assert found[0] == found[1]
