"""The engine on every KV format: limits, sharing, preemption and company change no answer, and memory holds more."""

import random
from pathlib import Path

import pytest
import tiny
import torch

from batchgen import kernels
from batchgen.engine import Engine, Request, Sampling, kv
from batchgen.engine.accuracy import Candidate, compare
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.decoder import load_decoder
from batchgen.kernels import kv_format

CPU = torch.device("cpu")
FORMATS = ("float32", "bfloat16", "fp8", "int8", "int4")
MAX_TOKENS = 10
SAMPLED = Sampling(max_tokens=MAX_TOKENS, temperature=1.0, n=3, seed=5)
each_format = pytest.mark.parametrize("kv_cache", FORMATS)


def prompts() -> list[list[int]]:
    """Two heads, branches inside blocks, a prompt that starts another, one of a single token."""
    long_start, short_start = tiny.random_prompt(37, seed=1), tiny.random_prompt(11, seed=2)
    made = [long_start + tiny.random_prompt(3 + i, seed=10 + i) for i in range(4)]
    made += [short_start + tiny.random_prompt(2 * i + 1, seed=20 + i) for i in range(3)]
    return [*made, long_start, short_start[:1], tiny.random_prompt(90, seed=40)]


@each_format
def test_the_first_blocks_are_populated_with_their_scales(monkeypatch, kv_cache: str) -> None:
    populated = []
    monkeypatch.setattr(kv, "populate", populated.append)
    shape = kv.KVShape(2, 3, 10, kv_format.FORMATS[kv_cache])
    pages = kv.KVPages(shape, 7, 4, CPU)
    pages.populate(5)
    assert sum(part.nbytes for part in populated) == 5 * 4 * shape.bytes_per_token
    for part in populated:
        assert part.is_contiguous()
        part.view(torch.uint8).fill_(1)
    for stored in (pages._codes, pages._scales):
        blocks = stored.view(torch.uint8).movedim(3, 0)
        assert bool((blocks[:5] == 1).all())
        assert not blocks[5:].any()


def test_no_more_is_prepared_than_there_is(answers, monkeypatch) -> None:
    folder, _ = answers("llama3", "int8")
    engine, asked = load(folder, "int8"), []
    monkeypatch.setattr(kv.KVPages, "populate", lambda pages, num_blocks: asked.append(num_blocks))
    for tokens in (0, 1, 33.5, 1e9):
        engine.prepare(tokens).join()
    assert asked == [0, 1, 3, engine.bounds.kv_tokens // 16]


def test_memory_is_prepared_while_a_run_uses_it(answers) -> None:
    folder, expected = answers("llama3", "int8")
    engine = load(folder, "int8")
    preparing = engine.prepare(engine.bounds.kv_tokens)
    assert run(engine, requests()) == expected
    preparing.join()


def requests() -> list[Request]:
    greedy = Sampling(max_tokens=MAX_TOKENS, temperature=0)
    made = [Request(key, prompt, greedy) for key, prompt in enumerate(prompts())]
    return [*made, *(Request(50 + key, prompt, SAMPLED) for key, prompt in enumerate(prompts()[:5]))]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """(family, format) -> (folder, answers of a plain run: rows alone, nothing shared); each made once."""
    folders: dict[str, Path] = {}
    made: dict[tuple[str, str], dict[int, list]] = {}

    def get(family: str, kv_cache: str) -> tuple[Path, dict[int, list]]:
        if family not in folders:
            folders[family] = tiny.tiny_model(family, tmp_path_factory.mktemp(family))
        if (family, kv_cache) not in made:
            engine = load(folders[family], kv_cache, prefix_sharing=False)
            made[family, kv_cache] = {key: one for request in requests() for key, one in run(engine, [request]).items()}
        return folders[family], made[family, kv_cache]

    return get


def load(folder: Path, kv_cache: str, **settings) -> Engine:
    settings = {"memory": "1MiB", "kv_cache": kv_cache, **settings}
    return Engine.load(str(folder), device="cpu", dtype="float32", **settings)


def run(engine: Engine, asked) -> dict[int, list]:
    finished = {completion.key: completion for completion in engine.run(asked)}
    assert all(completion.error is None for completion in finished.values())
    return {key: completion.tokens for key, completion in finished.items()}


@each_format
@pytest.mark.parametrize("family", ["llama3", "mistral"])
@pytest.mark.parametrize("settings", [{"block_size": 8}, {"block_size": 3, "max_batch_tokens": 7}], ids=str)
def test_limits_and_sharing_change_no_answer(answers, family, kv_cache, settings):
    folder, expected = answers(family, kv_cache)
    engine = load(folder, kv_cache, **settings)
    asked = requests()
    random.Random(1).shuffle(asked)
    assert run(engine, asked) == expected
    assert engine.statistics.cached_prompt_tokens > 100
    assert engine.resolved["kv_cache"] == kv_cache
    assert engine.resolved["dtype"] == "float32"


@each_format
def test_preemption_changes_no_answer(answers, kv_cache, monkeypatch):
    """In one run with sharing, copies of blocks that branches begin inside, and rows of three samples."""
    copies, real = [], kv.KVPages.copy_blocks

    def copy_blocks(pages, pairs, *where):
        copies.extend(pairs)
        real(pages, pairs, *where)

    monkeypatch.setattr(kv.KVPages, "copy_blocks", copy_blocks)
    folder, expected = answers("llama3", kv_cache)
    size = load(folder, kv_cache).model.kv_shape(kv_cache).bytes_per_token
    engine = load(folder, kv_cache, block_size=4, memory=size * 4 * 40, max_batch_tokens=64)
    # answers that end at once make the forecast small, so that the following ones are let in too early
    ended = Sampling(max_tokens=80, temperature=0, stop_token_ids=tuple(range(288)))
    short = [Request(1000 + i, [6 + i], ended) for i in range(64)]
    found = run(engine, iter(short + requests()))
    assert {key: found[key] for key in expected} == expected
    assert sum(isinstance(tokens[0], list) and len(tokens) == 3 for tokens in expected.values()) == 5
    assert engine.statistics.preemptions > 0
    assert engine.statistics.cached_prompt_tokens > 100
    assert len(copies) > 5


@pytest.mark.parametrize("kv_cache", ["int8", "int4"])
@pytest.mark.parametrize("side", ["_codes", "_scales"])
def test_a_copied_block_needs_both(answers, kv_cache, side, monkeypatch):
    """Leaving out the codes or the scales when a branch copies a block shows in the answers."""
    folder, expected = answers("llama3", kv_cache)
    real = kv.KVPages.copy_blocks

    def half(pages, *arguments):
        before = getattr(pages, side).clone()
        real(pages, *arguments)
        getattr(pages, side).copy_(before)

    monkeypatch.setattr(kv.KVPages, "copy_blocks", half)
    assert run(load(folder, kv_cache, block_size=16), requests()) != expected


def test_the_same_memory_holds_more_rows(answers):
    folder, _ = answers("llama3", "float32")
    blocks = {name: load(folder, name).resolved["kv_blocks"] for name in FORMATS}
    # heads of 16 numbers: 64, 32, 20, 20 and 16 bytes
    for name, size in zip(FORMATS, (64, 32, 20, 20, 16), strict=True):
        assert blocks[name] == 2**20 // (2 * 2 * 2 * size * 16)


@pytest.mark.parametrize("kv_cache", FORMATS)
def test_pages_take_what_a_token_is_said_to_take(answers, kv_cache):
    folder, _ = answers("mistral", "float32")
    shape = load(folder, kv_cache).model.kv_shape(kv_cache)
    pages = kv.KVPages(shape, 5, 3, CPU)
    stored = [part for index in range(shape.num_layers) for part in parts(pages.layer(index))]
    assert sum(part.nbytes for part in stored) == 15 * shape.bytes_per_token


def parts(layer) -> list[torch.Tensor]:
    return [part for side in (layer.keys, layer.values) for part in (side.codes, side.scales)]


DIVERGENCE = {"float32": 1e-9, "bfloat16": 2e-3, "fp8": 0.1, "int8": 5e-3, "int4": 0.5}


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_predictions_stay_close_to_those_over_float32(answers, kv_cache, dtype):
    folder, _ = answers("llama3", "float32")
    ops = kernels.load("cpu")
    model = load_decoder(open_checkpoint(str(folder)), dtype, CPU, ops)
    plain, rounded = (Candidate(model, ops, model.kv_shape(name)) for name in ("float32", kv_cache))
    result = compare(plain, rounded, [tiny.random_prompt(120, seed=3), tiny.random_prompt(9, seed=4)], 300)
    assert result.divergence <= DIVERGENCE[kv_cache]
    assert result.divergence > DIVERGENCE[kv_cache] / 10 or kv_cache in ("float32", "bfloat16")


def test_pages_start_at_a_cache_line():
    for width in (16, 24, 64):
        shape = kv.KVShape(2, 3, width, kv_format.FORMATS["int8"])
        pages = kv.KVPages(shape, 7, 8, CPU)
        first = pages.layer(0).keys
        assert (first.codes.data_ptr() % 64, first.scales.data_ptr() % 64) == (0, 0)


def test_what_a_block_holds_lies_together_on_the_host():
    """Memory is touched block by block: one that is not used takes none."""
    shape = kv.KVShape(5, 3, 16, kv_format.FORMATS["int8"])
    pages = kv.KVPages(shape, 7, 8, CPU)
    for which in range(2):
        of_block = [part[:, 2] for index in range(5) for part in parts(pages.layer(index))[which::2]]
        first = min(part.data_ptr() for part in of_block)
        last = max(part.data_ptr() + 2 * part.stride(0) * part.itemsize + part[0].nbytes for part in of_block)
        assert last - first == sum(part.nbytes for part in of_block)
