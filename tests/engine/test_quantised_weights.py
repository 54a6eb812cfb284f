"""Weights as whole numbers: exact from packed blocks, within the stated error when rounded at load, whole models."""

import logging
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from demo_model import demo_model_path
from forward import CPU, prompt_logits
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised import ExactActivations, Rounded, relative
from safetensors.torch import load_file
from tiny import FAMILIES, random_prompt, tiny_model
from tiny_gguf import random_blocks, write_gguf

from batchgen import kernels
from batchgen.engine import Engine, Request, Sampling
from batchgen.engine import decoder as decoder_module
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.decoder import Decoder, load_decoder
from batchgen.engine.linear import QuantisedLinear, SideBySide
from batchgen.engine.rewrite import rewrite
from batchgen.engine.spec import ModelError
from batchgen.engine.weights import expand
from batchgen.engine.weights.blocks import BLOCK_TYPES
from batchgen.engine.weights.formats import _layout
from batchgen.engine.weights.quantise import group_size, to_fp8, to_int4, to_int8
from batchgen.engine.weights.repack import Stored, stacked
from batchgen.engine.weights.tensors import DenseTensor, PackedTensor
from batchgen.kernels import Kernels
from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_int4 import Int4Weight
from batchgen.kernels.linear_int8 import Int8Weight

PROMPT = random_prompt(40, 3)
FOUR_BITS, EIGHT_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K), (Kind.Q8_0, Kind.Q6_K, Kind.MXFP4)
LAYERS = {"qkv", "output", "gate_up", "down"}
GROUPS = {Kind.MXFP4: 32, Kind.Q4_0: 32, Kind.Q4_1: 32, Kind.Q4_K: 32, Kind.Q8_0: 32, Kind.Q6_K: 16}


def load(path: Path, weights: str, ops: Kernels | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(open_checkpoint(str(path)), dtype, CPU, ops or kernels.load("cpu"), weights)


def logits(path: Path, weights: str, ops: Kernels | None = None) -> torch.Tensor:
    return prompt_logits(load(path, weights, ops), [PROMPT])[0]


# --- packed blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(7, 768), (1, 256), (700, 1024)])
def test_packed_blocks_are_kept_bit_for_bit(kind: Kind, shape: tuple[int, int]) -> None:
    packed = random_blocks(kind, *shape, seed=2)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, kind).astype(np.float32).reshape(shape))
    raw = np.ascontiguousarray(packed).view(np.uint8).reshape(shape[0], -1)
    stored = PackedTensor(BLOCK_TYPES[kind.value], shape, raw).quantised()
    assert stored is not None
    weight = stored.weight
    assert stored.order is None
    assert isinstance(weight, Int4Weight if kind in FOUR_BITS else Int8Weight)
    assert weight.shape == shape
    assert weight.group == GROUPS[kind]
    assert torch.equal(weight.values(), expected)
    assert weight.scale.dtype == (torch.float32 if kind in (Kind.Q4_K, Kind.Q6_K) else torch.float16)


@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS], ids=lambda kind: kind.name)
def test_blocks_of_another_kind_than_asked_for_are_left_alone(kind: Kind) -> None:
    raw = np.ascontiguousarray(random_blocks(kind, 3, 256, seed=2)).view(np.uint8).reshape(3, -1)
    source, made = PackedTensor(BLOCK_TYPES[kind.value], (3, 256), raw), Int4Weight if kind in FOUR_BITS else Int8Weight
    for kinds in ((Int4Weight,), (Int8Weight,), (Fp8Weight,), (Int8Weight, Int4Weight)):
        stored = source.quantised(*kinds)
        assert (stored is not None) == (made in kinds)
        assert stored is None or isinstance(stored.weight, made)


def test_plain_numbers_are_not_whole() -> None:
    raw = np.zeros((2, 64), dtype=np.uint8)
    assert PackedTensor(BLOCK_TYPES[1], (2, 32), raw).quantised() is None


# --- rounding at load ------------------------------------------------------------------------------------------------


def test_int8_errs_by_half_a_step() -> None:
    values = torch.randn(9, 101, generator=torch.Generator().manual_seed(1))
    values[3] = 0
    weight = to_int8(values)
    assert weight.q.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * 5
    assert ((weight.values() - values).abs() <= weight.scale * 0.5001).all()


def test_turned_int8_errs_less_where_a_weight_stands_out() -> None:
    values = torch.randn(9, 192, generator=torch.Generator().manual_seed(1))
    values[:, 5] *= 20
    whole, turned = (float((to_int8(values, turn=turn).values() - values).square().mean()) for turn in (False, True))
    assert turned < whole / 3


def test_projections_turned_and_not_stand_side_by_side() -> None:
    values = torch.randn(4, 64)
    stored = [Stored(to_int8(values, turn=turn)) for turn in (False, True, True)]
    assert [len(list(alike)) for _, alike in groupby(stored, key=_layout)] == [1, 2]
    assert torch.equal(stacked([stored[1].weight, stored[2].weight]).values(), stored[1].weight.values().repeat(2, 1))


def test_fp8_errs_by_a_sixteenth() -> None:
    """Three bits behind the point; below 2^-6 of a scale the steps no longer shrink."""
    values = torch.randn(9, 101, generator=torch.Generator().manual_seed(1)) * 0.02
    values[3] = 0
    values[4, 0] = 7.0
    weight = to_fp8(values)
    assert weight.q.float().abs().amax(1).tolist() == [448] * 3 + [0] + [448] * 5
    bound = (values.abs() / 16).maximum(weight.scale * 2.0**-10)
    assert ((weight.values() - values).abs() <= bound * 1.0001).all()


@pytest.mark.parametrize(("inputs", "group"), [(576, 64), (1536, 128), (96, 32), (40, 32), (4096, 128)])
def test_group_size(inputs: int, group: int) -> None:
    assert group_size(inputs) == group
    assert to_int4(torch.ones(2, inputs)).scale.shape == (2, -(-inputs // group))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 90), st.sampled_from([1e-6, 0.02, 3.0]))
def test_int4_is_no_worse_than_the_whole_range(seed: int, half: int, size: float) -> None:
    values = torch.randn(5, 2 * half, generator=torch.Generator().manual_seed(seed)) * size
    weight = to_int4(values)
    for first in range(0, 2 * half, weight.group):
        part, rounded = values[:, first : first + weight.group], weight.values()[:, first : first + weight.group]
        low, step = part.amin(1, keepdim=True), (part.amax(1, keepdim=True) - part.amin(1, keepdim=True)) / 15
        whole_range = ((part - low) / step.clamp_min(1e-30)).round() * step + low
        error, bound = (rounded - part).square().sum(1), (whole_range - part).square().sum(1)
        # scale and minimum are float16: half a unit in the last place of either may come on top
        slack = (2.0**-10 * part.abs().amax(1) + 2.0**-20).square() * part.shape[1]
        assert (error.sqrt() <= bound.sqrt() + slack.sqrt()).all()


def test_clipping_pays() -> None:
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    low, high = values.view(64, -1, 128).amin(-1, True), values.view(64, -1, 128).amax(-1, True)
    step = (high - low) / 15
    whole_range = (((values.view(64, -1, 128) - low) / step).round() * step + low).view(64, 512)
    assert relative(to_int4(values).values(), values) < 0.945 * relative(whole_range, values)


def test_int4_of_nothing_constant_and_huge() -> None:
    values = torch.tensor([[0.0] * 64, [0.5] * 64, [7e4] * 32 + [-7e4] * 32])
    weight = to_int4(values)
    assert weight.scale.dtype == torch.float32
    torch.testing.assert_close(weight.values(), values, rtol=1e-6, atol=0.0)


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_dequantise_and_multiply(family: str, weights: str, tmp_path: Path) -> None:
    """Native is the reference; rounded activations move the logits by less than 6 % (these models are touchy)."""
    folder = tiny_model(family, tmp_path / "model")
    own = logits(folder, weights)
    assert relative(own, logits(folder, weights, Rounded())) < 0.01
    assert 0 < relative(own, logits(folder, weights, ExactActivations())) < 0.06
    assert relative(own, logits(folder, "native")) < {"int8": 0.1, "fp8": 0.3, "int4": 0.7}[weights]


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_biases(weights: str, tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model", attention_bias=True, mlp_bias=True)
    own = logits(folder, weights, ExactActivations())
    torch.testing.assert_close(own, logits(folder, weights), rtol=0.2, atol=0.5)
    assert relative(own, logits(folder, "native")) < {"int8": 0.06, "fp8": 0.2, "int4": 0.5}[weights]


def test_native_and_auto_change_nothing(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    decoder = load(folder, "auto")
    tensors = load_file(folder / "model.safetensors")
    expected = torch.cat([tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(decoder._layers[1][0].qkv.rows(torch.arange(len(expected))), expected)
    assert decoder.rounding == {}


@pytest.mark.parametrize(
    ("weights", "kind", "rounded"),
    [
        ("int4", Kind.Q4_1, set()),
        ("int4", Kind.Q4_K, set()),
        ("int4", Kind.Q6_K, set()),
        ("int4", Kind.MXFP4, set()),
        ("int8", Kind.MXFP4, {"head"}),
        ("int4", Kind.Q8_0, LAYERS),
        ("int8", Kind.Q8_0, {"head"}),
        ("int8", Kind.Q6_K, {"head"}),
        ("int8", Kind.Q4_0, {*LAYERS, "head"}),
    ],
)
def test_what_a_file_has_packed_is_kept(weights: str, kind: Kind, rounded: set[str], tmp_path: Path) -> None:
    """But for a head in blocks beside layers of 8 bits, which is turned."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder = tiny_model("llama2", tmp_path / "model", **wide)
    write_gguf(folder, tmp_path / "model.gguf", lambda name: Kind.Q8_0 if "lm_head" in name else kind)
    decoder = load(tmp_path / "model.gguf", weights, ExactActivations())
    assert set(decoder.rounding) == rounded
    own, native = prompt_logits(decoder, [PROMPT])[0], logits(tmp_path / "model.gguf", "native")
    if not rounded & LAYERS:
        assert relative(own, native) < (0.02 if rounded else 1e-4)


def mixed(*parts: str) -> Callable[[str], Kind]:
    return lambda name: Kind.Q6_K if any(part in name for part in parts) else Kind.Q4_1


def test_projections_that_do_not_agree_stand_side_by_side(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "attention_bias": True}
    folder = tiny_model("llama2", tmp_path / "model", **wide)
    write_gguf(folder, tmp_path / "model.gguf", mixed("k_proj", "up_proj"))
    decoder = load(tmp_path / "model.gguf", "int4", ExactActivations())
    attention, mlp = decoder._layers[0]
    assert isinstance(attention.qkv, SideBySide)
    assert [part.packed.group for part in attention.qkv.parts] == [32, 16, 32]
    assert isinstance(mlp.gate_up, SideBySide)
    assert isinstance(mlp.down, QuantisedLinear)
    own = prompt_logits(decoder, [PROMPT])[0]
    torch.testing.assert_close(own, logits(tmp_path / "model.gguf", "native"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_a_tied_head_is_the_embedding_too(weights: str, tmp_path: Path) -> None:
    folder = tiny_model("smollm2", tmp_path / "model")
    decoder = load(folder, weights)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rows = decoder._embedding.rows(torch.arange(len(table)))
    balance = decoder._head.linear.packed.balance
    expected = to_int8(table, turn=True, balance=balance).values()
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)
    assert isinstance(decoder._head.linear, QuantisedLinear)
    assert decoder._head.linear(torch.zeros(1, 64, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_error_of_rounding_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    with caplog.at_level(logging.INFO):
        rounding = load(folder, "int4").rounding
    assert set(rounding) == {"qkv", "output", "gate_up", "down", "head"}
    assert rounding["head"] < 0.01
    assert all(0.03 < error < 0.12 for kind, error in rounding.items() if kind != "head")
    assert "rounded at load" in caplog.text
    engine = Engine.load(str(folder), device="cpu", weights="int4", memory="1MiB")
    assert engine.resolved["rounding"] == {kind: pytest.approx(error, abs=1e-6) for kind, error in rounding.items()}


def test_an_odd_number_of_inputs_is_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model", intermediate_size=97)
    with pytest.raises(ModelError, match=r"needs an even number of inputs, layers\.0\.down has 97; use int8"):
        load(folder, "int4")
    load(folder, "int8")


def test_what_a_load_needed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(decoder_module, "give_back", lambda: given.append(True))
    load(tiny_model("llama3", tmp_path / "model"), "int4")
    assert given == [True]


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("packed", [False, True], ids=["safetensors", "gguf"])
def test_no_matrix_is_held_in_float32(
    packed: bool, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 128,000 words and 4,096 inputs would take 2 GB, half of what such a model takes in 4 bits."""
    path = folder = tiny_model("llama3", tmp_path / "model")
    if packed:
        write_gguf(folder, path := tmp_path / "model.gguf", lambda name: Kind.F16)
    monkeypatch.setattr(expand, "_VALUES_PER_SLICE", 7 * 64)
    for kind in (DenseTensor, PackedTensor):
        monkeypatch.setattr(kind, "dequantise", of_few_rows(kind.dequantise))
    checkpoint = open_checkpoint(str(path))
    decoder = load_decoder(checkpoint, torch.bfloat16, CPU, kernels.load("cpu"), weights)
    assert decoder.rounding.keys() == {*LAYERS, "head"}
    (tmp_path / "out").mkdir()
    assert rewrite(checkpoint, tmp_path / "out", weights).errors.keys() == LAYERS


def of_few_rows(dequantise: Callable[[Any, torch.dtype], torch.Tensor]) -> Callable[[Any, torch.dtype], torch.Tensor]:
    def watched(source: DenseTensor | PackedTensor, dtype: torch.dtype) -> torch.Tensor:
        assert dtype != torch.float32 or len(source.shape) == 1 or source.shape[0] <= 7
        return dequantise(source, dtype)

    return watched


# --- the demo model --------------------------------------------------------------------------------------------------


def held_bytes(decoder: Decoder) -> int:
    linears = [
        linear
        for attention, mlp in decoder._layers
        for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    ]
    return sum(linear.packed.num_bytes() for linear in (*linears, decoder._head.linear))


def test_the_demo_model_in_four_bits() -> None:
    """Its Q4_1 and Q8_0 blocks stay as they are: nothing is rounded, and the weights take less than 110 MB."""
    decoder = load(demo_model_path(), "int4", dtype=torch.bfloat16)
    assert decoder.rounding == {}
    assert held_bytes(decoder) < 110e6


def test_the_demo_model_in_eight_bits() -> None:
    """Its head of Q8_0 blocks is turned like all the other linears, by which a product takes one scale an output."""
    decoder = load(demo_model_path(), "int8", dtype=torch.bfloat16)
    assert set(decoder.rounding) == {"qkv", "output", "gate_up", "down", "head"}
    assert isinstance(decoder._head.linear, QuantisedLinear)
    assert decoder._head.linear.packed.turned
    assert decoder._head.linear.packed.group == decoder.spec.hidden_size
    assert decoder.rounding["head"] < 0.015


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_the_demo_model_knows_a_capital(weights: str) -> None:
    engine = Engine.load(str(demo_model_path()), device="cpu", dtype="bfloat16", weights=weights, memory="64MiB")
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    (prompt,) = engine.tokenizer.encode([question], True)
    (answer,) = engine.run([Request(0, prompt, Sampling(max_tokens=16, temperature=0))])
    assert engine.tokenizer.decode(answer.tokens).startswith("The capital of France is Paris.")
