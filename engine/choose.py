"""The number formats of a job, for `auto` and for what it names: what is worth a trial here, tried on its first rows.

Puts checkpoint, machine, predicted times and the gate together; loads nothing where there is nothing to try.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..kernels import Kernels
from ..kernels.kv_format import FORMATS
from ..kernels.linear_fp8 import Fp8Weight
from ..kernels.linear_int4 import Int4Weight
from ..kernels.linear_int8 import Int8Weight
from .blocks import common_length
from .checkpoint import Checkpoint, open_checkpoint
from .config import EngineSettings
from .decoder import Decoder, load_decoder
from .device import load_kernels, resolve_device
from .engine import Engine
from .gate import NATIVE, REFERENCE, Choice, Question, Texts, choose
from .machine import compute_dtype, free_memory, use_granted_cores
from .request import Request, Sampling
from .tokenizer import load_tokenizer
from .weights.formats import QUANTISED

GAIN = 0.97  # a format must take less than this share of the job's time to be worth a trial
KEPT = 0.95  # a format that keeps the checkpoint's codes counts as this much faster: nothing is rounded for it
MEMORY_SHARE = 0.8  # of what is free that the unquantised weights may take
MOST_ROWS, MOST_TOKENS = 32, 1536  # of prompts that are measured on, shared tokens counted once
LONGEST = 768  # of the first prompt, and of what another does not share with it
ANSWER_TOKENS = 24

_A_LINEAR = "model.layers.0.mlp.down_proj.weight"
_KEEPS: Mapping[type, str] = {Int4Weight: "int4", Int8Weight: "int8", Fp8Weight: "fp8"}
Shares = Mapping[str, Mapping[str, float]]
Prompts = Callable[[], Iterable[Sequence[int]]]


def choose_formats(
    path: str,
    prompts: Prompts,
    shares: Shares,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    dtype: str = "auto",
    weights: str = "auto",
    kv_cache: str = "auto",
    device: str = "auto",
) -> Choice:
    """The formats for a model and the prompts it will be given; `prompts` is called only when something is tried.

    `shares`: by "weights" and "kv_cache", and format, the time predicted for the job beside that with native ones.
    In float32 `auto` tries nothing: the computation is exact. Raises ModelError as `Engine.load` does.
    """
    use_granted_cores()
    place = resolve_device(device)
    ops, checkpoint = load_kernels(place), open_checkpoint(path, revision)
    number_format = compute_dtype(dtype, checkpoint.dtype, place)
    exact = "float32" in (dtype, checkpoint.dtype if dtype == "auto" else None)
    question = _question(weights, kv_cache, checkpoint, number_format, exact, shares)
    reference = reference_dtype(checkpoint, number_format, place)

    def load(name: str) -> Decoder:
        if name == REFERENCE:
            return load_decoder(checkpoint, reference or number_format, place, ops, NATIVE)
        return load_decoder(checkpoint, number_format, place, ops, name)

    def answer(model: Decoder) -> Texts | None:
        return answered(model, checkpoint, load_tokenizer(tokenizer or path, revision), ops, prompts())

    if (question.weight_trials or question.kv_trials) and reference is None:
        note = "not measured: the unquantised model does not fit the free memory"
        return Choice(NATIVE if weights == "auto" else weights, kv_cache, note=note)
    return choose(question, load, answer, ops)


def _question(
    weights: str, kv_cache: str, checkpoint: Checkpoint, dtype: torch.dtype, exact: bool, shares: Shares
) -> Question:
    """What is to be tried; of weights nothing where they are to stay as they are."""
    tried = weights != NATIVE and not (weights == "auto" and exact)
    trials = _worth(_of(QUANTISED, shares["weights"]), weights, stored_format(checkpoint)) if tried else {}
    return Question(weights, kv_cache, trials, _kv_trials(kv_cache, exact, dtype, shares["kv_cache"]))


def stored_format(checkpoint: Checkpoint) -> str | None:
    """The format that keeps the checkpoint's codes, told by one of its linears; None for plain numbers."""
    for _, source in checkpoint.reader.tensors({_A_LINEAR}):
        stored = source.quantised()
        return None if stored is None else _KEEPS[type(stored.weight)]
    return None


def _kv_trials(kv_cache: str, exact: bool, dtype: torch.dtype, shares: Mapping[str, float]) -> dict[str, float]:
    own = str(dtype).removeprefix("torch.")
    if kv_cache == own or (kv_cache == "auto" and exact):
        return {}
    return _worth(_of((name for name, kind in FORMATS.items() if kind.scaled or name == kv_cache), shares), kv_cache)


def _of(names: Iterable[str], shares: Mapping[str, float]) -> dict[str, float]:
    """The shares of these formats; one of which nothing is known counts as no faster."""
    return {name: shares.get(name, 1.0) for name in names}


def _worth(shares: Mapping[str, float], asked: str, kept: str | None = None) -> dict[str, float]:
    """The format that is asked for; with auto all that save time, the fastest first."""
    if asked != "auto":
        return {asked: shares[asked]}
    order = sorted(shares, key=lambda name: shares[name] * (KEPT if name == kept else 1))
    return {name: shares[name] for name in order if shares[name] < GAIN}


def reference_dtype(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """What the unquantised model is computed in: float32, the compute dtype where that does not fit, None if neither.

    In 16 bits the reference would round about as much as what it is there to judge.
    """
    count = sum(torch.Size(shape).numel() for shape in checkpoint.reader.shapes().values())
    room = MEMORY_SHARE * free_memory(device)
    return next((kind for kind in (torch.float32, dtype) if count * kind.itemsize < room), None)


def answered(
    model: Decoder, checkpoint: Checkpoint, tokenizer: object, kernels: Kernels, prompts: Iterable[Sequence[int]]
) -> Texts | None:
    """The prompts that are measured on, each with the model's greedy answer; None when none has one."""
    chosen = select_prompts(prompts, model.spec.context_length - ANSWER_TOKENS)
    room = sum(-(-(len(prompt) + ANSWER_TOKENS) // 16) + 1 for prompt in chosen) * 16
    memory = max(room * model.kv_shape().bytes_per_token, 1 << 16)
    engine = Engine(model, checkpoint, tokenizer, kernels, EngineSettings(memory=memory))  # type: ignore[arg-type]
    greedy = Sampling(max_tokens=ANSWER_TOKENS, temperature=0)
    requests = [Request(key=index, prompt=list(prompt), sampling=greedy) for index, prompt in enumerate(chosen)]
    done = sorted(engine.run(requests), key=lambda completion: completion.key)
    texts = [(chosen[row.key], row.samples[0].tokens) for row in done if row.error is None and row.samples[0].tokens]
    if not texts:
        return None
    tokens = tuple((*prompt, *answer) for prompt, answer in texts)
    return Texts(tokens, tuple(len(prompt) for prompt, _ in texts), engine.bounds.vocabulary)


def select_prompts(prompts: Iterable[Sequence[int]], longest: int) -> list[tuple[int, ...]]:
    """Prompts that differ, the first ones, as long as the tokens they do not share with the very first are few.

    Of a long one the end is kept, where its answer begins, at most `longest` tokens. What the first one loses, those
    lose too that share it, so that they still begin alike.
    """
    chosen: dict[tuple[int, ...], None] = {}
    first: Sequence[int] = ()
    left = MOST_TOKENS
    for prompt in prompts:
        first = first or prompt
        cut = _end(prompt, first, max(0, longest))
        added = len(cut) - (common_length(next(iter(chosen)), cut) if chosen else 0)
        if not cut or cut in chosen or added > left:
            continue
        chosen[cut] = None
        left -= added
        if len(chosen) == MOST_ROWS:
            break
    return list(chosen)


def _end(prompt: Sequence[int], first: Sequence[int], longest: int) -> tuple[int, ...]:
    """The end of a prompt: with what it shares with the first one's end, or alone."""
    lost, common = max(0, len(first) - min(longest, LONGEST)), common_length(first, prompt)
    together = lost <= common and len(prompt) - common <= LONGEST
    kept = len(prompt) - lost if together else LONGEST
    return tuple(prompt[max(0, len(prompt) - min(kept, longest)) :])
