"""Tuning: the fastest candidate is found and kept, its file read back, and no run tunes by itself."""

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine import kv
from batchgen.engine.spec import ModelSpec
from batchgen.engine.tuning import (
    REPEATS,
    TOKENS,
    Product,
    Trial,
    attention_of,
    median_seconds,
    products_of,
    shapes_of,
    tune,
)
from batchgen.jobs.command_tune import TuneOptions, tune_model
from batchgen.jobs.errors import UsageError
from batchgen.kernels.attention.gpu_choice import Tile, TileKey
from batchgen.kernels.chip import Chip
from batchgen.kernels.grouped.choice import TABLES, Choice, Key, bucket, candidates
from batchgen.kernels.launch import Launch
from batchgen.kernels.tables import ReferenceKernels
from batchgen.kernels.tuned import read_tuned, tuned_file, write_tuned

FOREVER = float("inf")


def product(trial: Trial, kind: str, costs: dict[Choice | None, float], calls: list[Choice | None]) -> Product:
    """A product that asks for its choice as kernels do, and costs what that one costs."""

    def run(tokens: int) -> float:
        choice = trial.get(Key(kind, "int4", 32, bucket(tokens), 64, 32))
        calls.append(choice)
        if costs.get(choice, 1.0) == FOREVER:
            raise RuntimeError("out of resources: shared memory")
        return costs.get(choice, 1.0)

    return Product(kind, run)


def timer(call) -> float:
    return call()


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_the_fastest_candidate_is_found(kind):
    best = list(candidates(kind, 64))[-1]
    trial, calls, lines = Trial(), [], []
    found = tune([product(trial, kind, {best: 0.5}, calls)], trial, timer, FOREVER, lines.append)
    assert found[Key(kind, "int4", 32, 64, 64, 32)] == (best, 0.5)
    assert len(lines) == len(TOKENS)
    assert set(candidates(kind, 64)) <= set(calls)
    assert not trial


def test_what_is_hardly_faster_or_does_not_run_is_not_taken():
    first, second = list(candidates("wide", 16))[:2]
    trial, lines = Trial(), []
    costs = {first: 0.98, second: FOREVER}
    found = tune([product(trial, "wide", costs, [])], trial, timer, FOREVER, lines.append)
    assert all(choice != second and seconds < 0.97 for choice, seconds in found.values())
    assert lines[0].endswith("16 tokens: as built in")


def test_a_tile_that_triton_has_no_room_for_is_passed_over():
    """What Triton raises is no RuntimeError."""
    from triton.runtime.errors import OutOfResources

    def call() -> None:
        raise OutOfResources(150_000, 101_376, "shared memory")

    with pytest.raises(RuntimeError, match="Required: 150000, Hardware limit: 101376"):
        median_seconds(call)


def test_it_ends_in_time_with_what_it_has():
    trial, lines = Trial(), []
    assert tune([product(trial, "wide", {}, [])], trial, timer, time.perf_counter() - 1, lines.append) == {}
    assert lines == [f"time is up: {len(TOKENS)} of {len(TOKENS)} left out, they go by the built-in table"]


CHOICES = st.builds(
    Choice,
    st.sampled_from(["tiles", "split", "dense", "library"]),
    st.sampled_from([16, 128]),
    st.sampled_from([64, 128]),
    st.sampled_from([4, 8]),
    st.integers(2, 4),
    st.integers(1, 8),
)
SIZES = st.integers(1, 9)
KEYS = st.builds(
    Key,
    st.sampled_from(sorted(TABLES)),
    st.sampled_from(["int4", "e4m3"]),
    SIZES,
    st.sampled_from([16, 64]),
    SIZES,
    SIZES,
)


CACHES = st.sampled_from(["bfloat16", "fp8"])
TILE_KEYS = st.builds(TileKey, CACHES, CACHES, st.just("bfloat16"), st.sampled_from([64, 128]), st.booleans())
TILES = st.builds(Tile, st.sampled_from([32, 64]), st.sampled_from([4, 8]), st.integers(1, 4))
FOUND = st.builds(
    lambda products, tiles: {**products, **tiles},
    st.dictionaries(KEYS, CHOICES),
    st.dictionaries(TILE_KEYS, TILES, max_size=4),
)


@given(first=FOUND, second=FOUND)
def test_what_is_written_is_read_and_added_to(tmp_path_factory, first, second):
    path = tmp_path_factory.mktemp("tuned") / "deep" / "tuned.json"
    for found in (first, second):
        write_tuned(path, "NVIDIA H200", {key: (choice, 1e-5) for key, choice in found.items()})
    write_tuned(path, "another", {})
    assert read_tuned(path, "NVIDIA H200") == {**first, **second}
    assert read_tuned(path, "another") == read_tuned(path, "unknown") == {}


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "[]",
        '{"version": 1, "devices": {}}',
        '{"version": 2, "devices": {"X": [{"table": "wide"}]}}',
        '{"version": 2, "devices": {"X": [{"table": "wide", "codes": "int4", "group": 1, '
        '"tokens": 1, "outputs": 1, "inputs": 1, "choice": {"path": "magic"}}]}}',
        '{"version": 2, "devices": {"X": [{"table": "wide", "codes": "int4", "group": 1, '
        '"tokens": 1, "outputs": 1, "inputs": 1, "choice": {"path": "tiles", "tokens": 256}}]}}',
        '{"version": 2, "devices": {"X": [{"keys": "fp8", "values": "fp8", "dtype": "bfloat16", "head_dim": 64, '
        '"wide": true, "tile": {"keys": 48, "num_warps": 4, "num_stages": 2}}]}}',
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tuned\.json: no file of tuned choices of version 2 .*batchgen tune$"):
        read_tuned(path, "X")


@pytest.mark.parametrize(
    "text", ["[]", "nothing", '{"version": 1, "devices": {}}', '{"version": 2, "devices": {"X": [1]}}']
)
def test_a_file_that_is_none_is_not_written_over(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tuned\.json: no file of tuned choices of version 2 .*batchgen tune$"):
        write_tuned(path, "X", {})
    assert path.read_text() == text


def test_a_file_that_cannot_be_added_to_is_refused_before_the_tuning(tmp_path, monkeypatch):
    monkeypatch.setattr("batchgen.engine.device.resolve_device", torch.device)
    path = tmp_path / "tuned.json"
    path.write_text("[]")
    with pytest.raises(UsageError, match=r"--out: .*tuned\.json: no file of tuned choices"):
        tune_model("no model is opened", TuneOptions(("int4",), ("fp8",), "cuda", 1.0, path), print)


def test_where_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BATCHGEN_TUNED", raising=False)
    assert tuned_file() == tmp_path / "batchgen" / "tuned.json"
    assert read_tuned(tuned_file(), "X") == {}
    monkeypatch.setenv("BATCHGEN_TUNED", str(tmp_path / "mine.json"))
    with pytest.raises(ValueError, match=r"BATCHGEN_TUNED: there is no file .*mine\.json"):
        read_tuned(tuned_file(), "X")
    (tmp_path / "mine.json").write_text(json.dumps({"version": 2, "devices": {}}))
    assert read_tuned(tuned_file(), "X") == {}


def tiny_spec() -> ModelSpec:
    spec = ModelSpec.__new__(ModelSpec)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
    for name, value in {**sizes, "vocab_size": 300}.items():
        object.__setattr__(spec, name, value)
    return spec


def test_products_of_a_model_multiply_in_every_format():
    spec = tiny_spec()
    assert shapes_of(spec) == {
        "qkv": (128, 64),
        "output": (64, 64),
        "gate_up": (192, 64),
        "down": (64, 96),
        "head": (300, 64),
    }
    made = list(products_of(spec, ("int8", "fp8"), ReferenceKernels(), torch.float32, torch.device("cpu")))
    outputs = [one.run(3).shape[1] for one in made]
    assert outputs == [128, 64, 192, 64, 300, 128, 64, 192, 64]  # the head of fp8 is that of int8


def asked(formats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """What each product of the tiny model asks for at 16 tokens, on a device that launches nothing."""
    from batchgen.kernels.gpu_table import GpuKernels

    monkeypatch.setattr(Launch, "run", lambda launch: None)
    trial, keys = Trial(), []
    for one in products_of(tiny_spec(), formats, GpuKernels(Chip(), trial), torch.float32, torch.device("cpu")):
        one.run(16)
        assert trial.asked is not None
        keys.append(trial.asked)
    return keys


def test_every_product_is_tuned_for_itself(monkeypatch):
    keys = asked(("int4", "int8", "fp8"), monkeypatch)
    assert len(set(keys)) == len(keys)


def attention_products(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    from batchgen.kernels.gpu_table import GpuKernels

    monkeypatch.setattr(Launch, "run", lambda launch: None)
    monkeypatch.setattr(kv, "_zeros", lambda sizes, dtype, device: torch.zeros(sizes, dtype=dtype))  # as on a device
    kernels = GpuKernels(Chip(), trial)
    return list(attention_of(tiny_spec(), ("fp8",), kernels, torch.bfloat16, torch.device("cpu")))


def test_attention_is_tuned_for_few_queries_and_for_many(monkeypatch):
    trial, best = Trial(), Tile(32, 4, 2)
    decode, prompt = attention_products(trial, monkeypatch)
    keys = [TileKey("fp8", "fp8", "bfloat16", 16, wide) for wide in (False, True)]

    def timer(call) -> float:
        call()
        return 0.5 if best in trial.values() else 1.0

    lines: list[str] = []
    found = tune([prompt, decode], trial, timer, FOREVER, lines.append)
    assert found == dict.fromkeys(keys, (best, 0.5))
    assert (
        lines[0] == "[1/2] attention, KV fp8, decode, 64 tokens: 1000000.0 to 500000.0 us by 32 keys, 4 warps, 2 stages"
    )


def test_a_small_weight_is_read_from_another_copy_each_time():
    """As in a model, where the weights of other layers lie between."""
    read = []

    class Watched(ReferenceKernels):
        def linear_int8(self, x, weight, bias, dtype):
            read.append(weight.q.data_ptr())
            return super().linear_int8(x, weight, bias, dtype)

    product = next(products_of(tiny_spec(), ("int8",), Watched(), torch.float32, torch.device("cpu")))
    for _ in range(REPEATS + 1):
        product.run(1)
    assert len(set(read[:REPEATS])) == REPEATS
    assert read[REPEATS] == read[0]


def test_heads_are_tuned_as_they_are_held(monkeypatch):
    keys = asked(("int4", "fp8"), monkeypatch)
    assert [key.codes for key in keys if key.outputs == 300] == ["int8"]
    assert {key.table for key in keys if key.codes == "int4"} == {"mixed", "mixed sums"}
