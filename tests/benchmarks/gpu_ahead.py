"""Has the kernels that are going to be timed compiled first, by calls that are spread over processes.

What a call makes is thrown away: the processes that time find the compiled kernels on disk. Knows which calls meet all
kernels of a part, in little time beside compiling them.
"""

from collections.abc import Callable
from typing import Any

import torch
from gpu_eight_billion import step_cases
from gpu_generation import FORMATS, Roofline, Sizes, decode, jobs, prompts_of
from gpu_kernels import SMALLER, Limits
from gpu_workers import Call
from random_model import LLAMA_8B, SMALL, random_engine

from batchgen import kernels as op_tables
from batchgen.kernels.attention.gpu_cases import large_op

BATCHES = (1, 16, 32, 64, 128, 256, 512, 1024)  # where the ways of quantised products part
CONTEXTS = {1: 1024, 64: 1024}  # of some of them; keys are then split among programs
CONTEXT, STEPS = 40, 5  # of the others; enough steps for one to be recorded
FEW = ((2048, 1, 4, 0), (2100, 4, 16, 2000))  # prompt, answer, rows, tokens shared


def calls(device: torch.device, parts: list[str]) -> dict[str, list[Call]]:
    """By part; none on a CPU, which compiles nothing."""
    if device.type == "cpu":
        return {}
    last = str(device), False
    steps = range(len(list(step_cases(op_tables.load(str(device)), device, False))))
    attention = range(len(large_op().cases))
    made: dict[str, list[Call]] = {
        "generation": [(fault_of, (make_model, one, work, *last)) for one in range(len(FORMATS)) for work in WORK],
        "kernels": [(fault_of, (make_attention, one, *last)) for one in attention]
        + [(fault_of, (make_step, one, *last)) for one in steps],
    }
    return {part: some for part, some in made.items() if part in parts}


def fault_of(make: Callable[..., None], *arguments: Any) -> str:
    """What the call raised, or nothing; it is found again where it is timed."""
    try:
        make(*arguments)
    except Exception as fault:  # no call may cost the others
        return f"{type(fault).__name__}: {fault}"[:200]
    return ""


def make_step(number: int, device: str, smoke: bool) -> None:
    """Makes and runs one of the steps."""
    kernels = op_tables.load(device)
    _, make = list(step_cases(kernels, torch.device(device), smoke))[number]
    with torch.inference_mode():
        make()


def make_attention(number: int, device: str, smoke: bool) -> None:
    """The same for a step of attention: sizes are not what is compiled for, formats and kinds of tasks are."""
    op, kernels = large_op(SMALLER if smoke else 1), op_tables.load(device)
    with torch.inference_mode(), torch.device(device):
        op.run(kernels, *op.cases[number].make(torch.bfloat16))


def make_model(number: int, work: str, device: str, smoke: bool) -> None:
    """One layer of the model in one of its formats, which has the kernels of all layers, at some of its work."""
    _, weights, cache = FORMATS[number]
    config = {**(SMALL if smoke else LLAMA_8B), "num_hidden_layers": 1}
    memory = "4MiB" if smoke else "1GiB"
    engine = random_engine(config, weights, torch.device(device), torch.bfloat16, kv_cache=cache, memory=memory)
    WORK[work](engine, Roofline(engine, Limits(1.0, 1.0, 1.0), weights), smoke)


def _decode(engine: Any, bound: Roofline, smoke: bool) -> None:
    for batch in BATCHES[:1] if smoke else BATCHES:
        decode(engine, bound, batch, Sizes(context=CONTEXTS.get(batch, CONTEXT), steps=STEPS))


def _jobs(engine: Any, bound: Roofline, smoke: bool) -> None:
    for prompt, answer, rows, shared in ((30, 2, 2, 20),) if smoke else FEW:
        jobs(engine, bound, prompts_of(engine, prompt, rows, shared), answer, shared)


WORK: dict[str, Callable[[Any, Roofline, bool], None]] = {"decode": _decode, "prompts": _jobs}
