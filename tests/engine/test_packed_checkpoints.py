"""GPTQ, AWQ, compressed-tensors and FP8 against files packed by hand: exact values, whole models, refusals by name."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forward import CPU, prompt_logits
from packing import AWQ_ORDER, Tensors, repack_folder, words
from quantised import ExactActivations, relative
from safetensors.torch import load_file, save_file
from tiny import random_prompt, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from batchgen import kernels
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.decoder import Decoder, load_decoder
from batchgen.engine.linear import QuantisedLinear, SideBySide
from batchgen.engine.spec import ModelError
from batchgen.engine.weights.schemes import scheme
from batchgen.kernels.linear_fp8 import Fp8Weight
from batchgen.kernels.linear_fp8.cases import NUMBERS
from batchgen.kernels.linear_int4 import Int4Weight
from batchgen.kernels.linear_int8 import Int8Weight

PROMPT = random_prompt(30, 3)
GROUP = 32
Pack = Callable[[str, int, int], tuple[Tensors, torch.Tensor]]


def numbers(module: str, outputs: int, inputs: int, group: int, limit: int = 16) -> tuple[torch.Tensor, ...]:
    """Codes [N, K], zero points [N, groups] among them 0, 1 and the largest, float16 scales [N, groups]."""
    generator = torch.Generator().manual_seed(sum(map(ord, module)))
    groups = -(-inputs // group)
    codes = torch.randint(0, limit, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, limit, (outputs, groups), generator=generator)
    zeros[0], zeros[1], zeros[2] = 0, 1, limit - 1
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) * 0.6 / limit
    return codes, zeros, scales.half()


def values(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, index]) * scales.float()[:, index]


def group_index(inputs: int, kind: str, group: int) -> torch.Tensor:
    index = torch.arange(inputs) // group
    if kind == "random":
        return index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    return torch.zeros(inputs, dtype=torch.int64) if kind == "zero" else index


def gptq(version: int = 1, group: int = GROUP, index: str = "trivial", bits: int = 4, sym: bool = False) -> Pack:
    def pack(module: str, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        size = inputs if group == -1 else group
        codes, zeros, scales = numbers(module, outputs, inputs, size, 2**bits)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
        g_idx = group_index(inputs, index, size)
        stored = (zeros - 1) % 2**bits if version == 1 else zeros
        pieces = {
            "qweight": words(codes, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": scales.T,
            "g_idx": g_idx.int(),
        }
        return pieces, values(codes, zeros, scales, g_idx)

    return pack


def awq(module: str, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = numbers(module, outputs, inputs, GROUP)
    pieces = {"qweight": words(codes.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
    return pieces, values(codes, zeros, scales, group_index(inputs, "trivial", GROUP))


def compressed(symmetric: bool, group: int = GROUP, bits: int = 4, index: str = "trivial") -> Pack:
    def pack(module: str, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        size = inputs if group == -1 else group
        codes, zeros, scales = numbers(module, outputs, inputs, size, 2**bits)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        g_idx = group_index(inputs, index, size)
        pieces = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            pieces["weight_zero_point"] = words(zeros.T, bits).T
        if index != "trivial":
            pieces["weight_g_idx"] = g_idx.int()
        return pieces, values(codes, zeros, scales.bfloat16(), g_idx)

    return pack


def int_quantized(module: str, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
    codes, _, scales = numbers(module, outputs, inputs, inputs, 256)
    codes = (codes - 128).to(torch.int8)
    return {"weight": codes, "weight_scale": scales.bfloat16()}, codes * scales.bfloat16().float()


def fp8(scale_name: str, block: tuple[int, int] | None = None, per: str = "output", exponents: bool = False) -> Pack:
    """`per`: output or tensor, where there are no blocks; `exponents`: scales are powers of two, a byte each."""

    def pack(module: str, outputs: int, inputs: int) -> tuple[Tensors, torch.Tensor]:
        generator = torch.Generator().manual_seed(sum(map(ord, module)))
        codes = torch.randint(0, 254, (outputs, inputs), generator=generator)
        codes = codes + (codes >= 127)
        rows, columns = block or ((1, inputs) if per == "output" else (outputs, inputs))
        shape = (-(-outputs // rows), -(-inputs // columns))
        scale = (torch.rand(shape, generator=generator) + 0.5) * 2e-3
        stored = scale
        if exponents:
            power = scale.log2().round()
            scale, stored = 2**power, (power + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        held = torch.empty(outputs, inputs, dtype=torch.float64)
        for row in range(outputs):
            for column in range(inputs):
                held[row, column] = NUMBERS[codes[row, column]] * scale[row // rows, column // columns]
        pieces = {"weight": codes.to(torch.uint8).view(torch.float8_e4m3fn), scale_name: stored}
        if per == "tensor":
            pieces |= {scale_name: stored.reshape(()), "input_scale": torch.tensor(0.1)}
        return pieces, held.float()

    return pack


def gptq_settings(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, **fields}


def compressed_settings(layout: str, **weights: Any) -> dict[str, Any]:
    fields = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}},
        "ignore": ["lm_head"],
    }


def float_settings(**weights: Any) -> dict[str, Any]:
    return compressed_settings("float-quantized", **{"num_bits": 8, "type": "float", "group_size": None, **weights})


def kept_format(name: str) -> str:
    """The value of `weights` that keeps the codes of a format above."""
    if name.startswith(("fp8", "float")):
        return "fp8"
    return "int8" if "8 bits" in name or name == "int-quantized" else "int4"


HELD = {"int4": Int4Weight, "int8": Int8Weight, "fp8": Fp8Weight}
AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq v1": (gptq_settings(), gptq()),
    "gptq v1 named": (gptq_settings(checkpoint_format="gptq"), gptq()),
    "gptq v2": (gptq_settings(checkpoint_format="gptq_v2"), gptq(2)),
    "gptq symmetric": (gptq_settings(sym=True), gptq(sym=True)),
    "gptq act-order": (gptq_settings(desc_act=True), gptq(index="random")),
    "gptq act-order unsaid": (gptq_settings(), gptq(index="random")),
    "gptq one group": (gptq_settings(group_size=-1), gptq(group=-1)),
    "gptq ragged": (gptq_settings(group_size=40), gptq(group=40)),
    "gptq 8 bits": (gptq_settings(bits=8), gptq(bits=8)),
    "awq": (AWQ_SETTINGS, awq),
    "compressed symmetric": (compressed_settings("pack-quantized"), compressed(True)),
    "compressed asymmetric": (compressed_settings("pack-quantized", symmetric=False), compressed(False)),
    "compressed one group": (compressed_settings("pack-quantized", group_size=None), compressed(True, -1)),
    "compressed act-order": (compressed_settings("pack-quantized", actorder="group"), compressed(True, index="random")),
    "compressed 8 bits": (compressed_settings("pack-quantized", num_bits=8), compressed(True, bits=8)),
    "compressed asymmetric 8 bits": (
        compressed_settings("pack-quantized", num_bits=8, symmetric=False),
        compressed(False, bits=8),
    ),
    "fp8 per tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", per="tensor")),
    "fp8 per tensor, inverse": ({"quant_method": "fp8"}, fp8("weight_scale_inv", per="tensor")),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, fp8("weight_scale_inv", (24, 40))),
    "fp8 blocks with exponents": (
        {"quant_method": "fp8", "weight_block_size": [24, 40], "scale_fmt": "ue8m0"},
        fp8("weight_scale_inv", (24, 40), exponents=True),
    ),
    "float-quantized": (float_settings(strategy="channel"), fp8("weight_scale")),
    "float-quantized tensor": (float_settings(strategy="tensor"), fp8("weight_scale", per="tensor")),
    "float-quantized group": (float_settings(strategy="group", group_size=16), fp8("weight_scale", (1, 16))),
    "float-quantized blocks": (
        float_settings(strategy="block", block_structure=[16, 48]),
        fp8("weight_scale", (16, 48)),
    ),
    "int-quantized": (compressed_settings("int-quantized", num_bits=8, group_size=None), int_quantized),
}


def load(folder: Path, weights: str) -> Decoder:
    ops = kernels.load("cpu") if weights == "native" else ExactActivations()
    return load_decoder(open_checkpoint(str(folder)), torch.float32, CPU, ops, weights)


@torch.no_grad()
def reference(folder: Path, held: Tensors) -> torch.Tensor:
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config.tie_word_embeddings = "lm_head.weight" not in held
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    model.load_state_dict(held, strict=True)
    return model.eval()(torch.tensor([PROMPT]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_exact(name: str, tmp_path: Path) -> None:
    settings, pack = FORMATS[name]
    folder = tiny_model("llama3", tmp_path / "model")
    held = repack_folder(folder, settings, pack)
    reader = open_checkpoint(str(folder)).reader
    assert reader.shapes() == {name: tuple(tensor.shape) for name, tensor in held.items()}
    for tensor, source in reader.tensors(held):
        if len(source.shape) == 2:
            assert torch.equal(torch.cat(list(source.float_rows())), source.dequantise(torch.float32))
        # one product more or less rounds: scale * code + minimum against scale * (code - zero)
        torch.testing.assert_close(source.dequantise(torch.float32), held[tensor], rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_models_are_dequantise_and_multiply(name: str, tmp_path: Path) -> None:
    settings, pack = FORMATS[name]
    folder = tiny_model("llama3", tmp_path / "model")
    held = repack_folder(folder, settings, pack, plain=("layers.1.self_attn.o_proj",))
    expected = reference(folder, held)
    own = prompt_logits(load(folder, "native"), [PROMPT])[0]
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
    kept = kept_format(name)
    decoder = load(folder, kept)
    assert decoder.rounding.keys() == {"head", "output"}  # what was left plain
    attention, mlp = decoder._layers[0]
    for linear in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
        assert isinstance(linear, QuantisedLinear)
        assert isinstance(linear.packed, HELD[kept])
        assert (linear.order is not None) == ("act-order" in name)
    assert relative(prompt_logits(decoder, [PROMPT])[0], expected) < (0.3 if kept == "int4" else 0.05)


@pytest.mark.parametrize("family", ["llama3", "smollm2"], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["gptq v2", "awq", "compressed symmetric", "int-quantized", "float-quantized"])
def test_a_packed_head_is_a_head(name: str, family: str, tmp_path: Path) -> None:
    settings, pack = FORMATS[name]
    folder = tiny_model(family, tmp_path / "model", vocab_size=320)
    held = repack_folder(folder, settings, pack)
    pieces, held["lm_head.weight"] = pack("lm_head", 320, 64)
    tensors = load_file(folder / "model.safetensors") | {f"lm_head.{piece}": of for piece, of in pieces.items()}
    kept = {name: of.contiguous() for name, of in tensors.items() if name != "lm_head.weight" or "weight" in pieces}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    own = prompt_logits(load(folder, "native"), [PROMPT])[0]
    torch.testing.assert_close(own, reference(folder, held), rtol=1e-3, atol=1e-3)
    decoder = load(folder, kept_format(name))
    assert isinstance(decoder._head.linear.packed, HELD[kept_format(name)])
    assert decoder.rounding == {}


def test_projections_in_different_orders_stand_side_by_side(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    ordered, plain = gptq(index="random"), gptq()
    held = repack_folder(
        folder, gptq_settings(), lambda name, *shape: (ordered if "k_proj" in name else plain)(name, *shape)
    )
    decoder = load(folder, "int4")
    assert isinstance(decoder._layers[0][0].qkv, SideBySide)
    assert relative(prompt_logits(decoder, [PROMPT])[0], reference(folder, held)) < 0.02


def test_native_kernels_take_every_format(tmp_path: Path) -> None:
    for name, (settings, pack) in FORMATS.items():
        folder = tiny_model("llama3", tmp_path / name)
        repack_folder(folder, settings, pack)
        weights = kept_format(name)
        fast = load_decoder(open_checkpoint(str(folder)), torch.float32, CPU, kernels.load("cpu"), weights)
        exact = prompt_logits(load(folder, weights), [PROMPT])[0]
        assert relative(prompt_logits(fast, [PROMPT])[0], exact) < 0.06, name


@pytest.mark.parametrize("bits", [4, 8])
def test_a_largest_stored_zero_point_is_told_once(bits: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, gptq_settings(bits=bits), gptq(bits=bits))
    with caplog.at_level(logging.WARNING):
        load(folder, "int8")  # reads every module, some of them twice
    (told,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        rf"model\.layers\..*_proj: a zero point is stored as {2**bits - 1}, .* as {2**bits} elsewhere", told
    )


def test_an_index_that_fills_no_groups_is_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, gptq_settings(), gptq(index="zero"))
    with pytest.raises(ModelError, match=r"down_proj: its packed weight cannot be read \(g_idx does not put 32 inputs"):
        load(folder, "native")


def without(ending: str, modules: int | None = None) -> Callable[[Tensors], None]:
    """Takes pieces of the first modules, or of all, out of a checkpoint's tensors."""

    def edit(tensors: Tensors) -> None:
        for name in sorted(name for name in tensors if name.endswith(ending))[:modules]:
            del tensors[name]

    return edit


def changed(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Changes a piece of the first module."""

    def edit(tensors: Tensors) -> None:
        name = next(name for name in sorted(tensors) if name.endswith(ending))
        tensors[name] = change(tensors[name]).contiguous()

    return edit


def edited_folder(folder: Path, settings: dict[str, Any], pack: Pack, edit: Callable[[Tensors], None]) -> Path:
    repack_folder(tiny_model("llama3", folder), settings, pack)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("modules", [None, 1], ids=["of all", "of one"])
@pytest.mark.parametrize("order", ["desc_act", "group", "dynamic", True])
def test_a_missing_order_of_inputs_is_refused(order: str | bool, modules: int | None, tmp_path: Path) -> None:
    settings, pack, piece = gptq_settings(desc_act=True), gptq(index="random"), "g_idx"
    if order != "desc_act":
        settings, pack = compressed_settings("pack-quantized", actorder=order), compressed(True, index="random")
        piece = "weight_g_idx"
    folder = edited_folder(tmp_path / "model", settings, pack, without(piece, modules))
    with pytest.raises(ModelError, match=r"^model\.layers\.0\..*_proj: .*yet its g_idx is missing"):
        load(folder, "native")


@pytest.mark.parametrize(
    ("settings", "pack", "piece"),
    [
        (gptq_settings(desc_act=True, group_size=-1), gptq(group=-1), ".g_idx"),
        (gptq_settings(desc_act=True, static_groups=True), gptq(), ".g_idx"),
        (compressed_settings("pack-quantized", actorder="weight"), compressed(True), ".nothing"),
        (compressed_settings("pack-quantized", actorder="static"), compressed(True), ".nothing"),
    ],
    ids=["one group", "static groups", "weight", "static"],
)
def test_groups_of_neighbours_need_no_order(settings: dict[str, Any], pack: Pack, piece: str, tmp_path: Path) -> None:
    whole = edited_folder(tmp_path / "whole", settings, pack, without(".nothing"))
    folder = edited_folder(tmp_path / "model", settings, pack, without(piece))
    assert torch.equal(
        prompt_logits(load(folder, "native"), [PROMPT])[0], prompt_logits(load(whole, "native"), [PROMPT])[0]
    )


@pytest.mark.parametrize(
    "change",
    [lambda index: index[:GROUP], lambda index: torch.cat([index, index + 2]), lambda index: index.view(2, -1)],
    ids=["short", "long", "two-dimensional"],
)
@pytest.mark.parametrize("index", ["trivial", "random"])
def test_an_index_of_another_shape_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], index: str, tmp_path: Path
) -> None:
    pack = gptq(index=index)
    folder = edited_folder(tmp_path / "model", gptq_settings(desc_act=True), pack, changed(".g_idx", change))
    with pytest.raises(
        ModelError, match=r"down_proj: its packed weight cannot be read \(g_idx is \[.*\], for \d+ inputs"
    ):
        load(folder, "native")


@pytest.mark.parametrize("group", [1, 2, 7])
def test_groups_that_no_product_takes_are_refused_by_name(group: int, tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, gptq_settings(group_size=group), gptq(group=group))
    with pytest.raises(ModelError, match=rf"_proj.weight: .*groups of {group} inputs.*model.weights: native takes it"):
        load_decoder(open_checkpoint(str(folder)), torch.float32, CPU, kernels.load("cpu"), "int4")


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, gptq_settings(group_size=16), gptq())
    with pytest.raises(ModelError, match=r"scales \[64, 3\].*group 16"):
        load(folder, "native")


def add_tensors(folder: Path, tensors: Tensors) -> None:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", {"format": "pt"})


KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale")


@pytest.mark.parametrize("packed", [True, False], ids=["packed weights", "plain weights"])
def test_scales_of_the_kv_cache_are_superseded(packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A narrow KV cache here has a scale for each token and head, so those of the checkpoint are read by nobody."""
    folder = tiny_model("llama3", tmp_path / "model")
    settings = compressed_settings("float-quantized", num_bits=8, type="float", strategy="channel")
    if not packed:
        settings["config_groups"] = {}
    settings["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    held = repack_folder(folder, settings, fp8("weight_scale"), plain=() if packed else ("_proj",))
    add_tensors(folder, {f"model.layers.{i}.{name}": torch.tensor(0.1) for i in range(2) for name in KV_SCALES})
    with caplog.at_level(logging.INFO):
        own = prompt_logits(load(folder, "native"), [PROMPT])[0]
    assert "6 KV scales of the checkpoint not used" in caplog.text
    torch.testing.assert_close(own, reference(folder, held), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_without_a_place_must_be_zero(value: float, tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, gptq_settings(), gptq())
    add_tensors(folder, {"model.layers.0.mlp.up_proj.bias": torch.tensor([0.0] * 95 + [value])})
    if value:
        with pytest.raises(ModelError, match=r"in the checkpoint but not in this model: .*up_proj\.bias"):
            load(folder, "native")
    else:
        load(folder, "native")


def test_a_nan_among_the_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, float_settings(strategy="channel"), fp8("weight_scale"))
    name = "model.layers.1.mlp.down_proj.weight"
    codes = load_file(folder / "model.safetensors")[name].view(torch.uint8).clone()
    codes[3, 5] = 0xFF
    add_tensors(folder, {name: codes.view(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj: .*a NaN among the weights"):
        load(folder, "native")


def test_a_missing_piece_is_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, gptq_settings(), gptq())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.qzeros"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj: its packed weight cannot be read \(qzeros is missing\)"):
        load(folder, "native")


@pytest.mark.parametrize(
    ("settings", "words_"),
    [
        (gptq_settings(bits=3), r"bits: '3'"),
        (gptq_settings(group_size=0), r"group_size: '0'"),
        (gptq_settings(checkpoint_format="marlin"), r"checkpoint_format: 'marlin'"),
        (gptq_settings(dynamic={"-:lm_head": {}}), r"dynamic"),
        ({**AWQ_SETTINGS, "version": "gemv"}, r"version: 'gemv'"),
        (compressed_settings("marlin-24"), r"format: 'marlin-24'"),
        (compressed_settings("pack-quantized", num_bits=3), r"num_bits: '3'"),
        (compressed_settings("pack-quantized", type="float"), r"format"),
        ({**compressed_settings("pack-quantized"), "transform_config": {"a": 1}}, r"transform_config"),
        (float_settings(strategy="attn_head"), r"strategy: 'attn_head'"),
        (float_settings(strategy="block"), r"block_structure: 'None'"),
        (float_settings(type="int"), r"format: 'float-quantized'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt: 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size"),
        ({**compressed_settings("pack-quantized"), "config_groups": {}}, r"config_groups"),
        ({"quant_method": "bitsandbytes"}, r"'bitsandbytes' is not supported \(there are: gptq, awq"),
    ],
)
def test_settings_not_understood_are_refused(settings: dict[str, Any], words_: str, tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    repack_folder(folder, settings, gptq())
    with pytest.raises(ModelError, match=words_):
        load(folder, "native")


def zero_points(stored: Callable[[int, int], torch.Tensor]) -> Callable[[Tensors], None]:
    """Adds zero points, of so many outputs and groups, to the modules."""

    def edit(tensors: Tensors) -> None:
        for module in [name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")]:
            tensors[f"{module}_zero_point"] = stored(*tensors[f"{module}_scale"].shape).contiguous()

    return edit


@pytest.mark.parametrize(
    ("stored", "is_read"),
    [
        (lambda outputs, groups: words(torch.full((groups, outputs), 8), 4).T, True),
        (lambda outputs, groups: torch.zeros(outputs, groups, dtype=torch.int8), True),
        (lambda outputs, groups: words(torch.full((groups, outputs), 7), 4).T, False),
        (lambda outputs, groups: torch.ones(outputs, groups, dtype=torch.int8), False),
    ],
    ids=["middle", "zeros", "packed", "plain"],
)
def test_zero_points_beside_a_symmetric_scheme_must_say_nothing(
    stored: Callable[[int, int], torch.Tensor], is_read: bool, tmp_path: Path
) -> None:
    """They were not looked at, whatever they said."""
    settings, pack = FORMATS["compressed symmetric"]
    folder = edited_folder(tmp_path / "model", settings, pack, zero_points(stored))
    if is_read:
        plain = edited_folder(tmp_path / "plain", settings, pack, without(".nothing"))
        found = prompt_logits(load(folder, "native"), [PROMPT])[0]
        assert torch.equal(found, prompt_logits(load(plain, "native"), [PROMPT])[0])
    else:
        with pytest.raises(ModelError, match=r"_proj: .*symmetric, yet its weight_zero_point shifts it"):
            load(folder, "native")


@pytest.mark.parametrize(
    ("name", "piece", "change", "message"),
    [
        ("gptq v1", ".qweight", lambda words: words.flatten(), r"down_proj\.qweight is \[768\], no matrix"),
        ("gptq v1", ".qweight", lambda words: words[None], r"down_proj\.qweight is \[1, 12, 64\], no matrix"),
        ("float-quantized", "down_proj.weight", lambda codes: codes.flatten(), r"down_proj\.weight is \[6144\]"),
        ("awq", ".scales", lambda scales: scales.int(), r"down_proj: .*\(scales are torch\.int32, no floats"),
    ],
)
def test_pieces_of_another_kind_are_refused(
    name: str, piece: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path
) -> None:
    folder = edited_folder(tmp_path / "model", *FORMATS[name], changed(piece, change))
    with pytest.raises(ModelError, match=message):
        load(folder, "native")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([1], r"quantization_config: must be a mapping, got '\[1\]'"),
        ("gptq", "quantization_config: must be a mapping, got 'gptq'"),
        ({**compressed_settings("pack-quantized"), "config_groups": "all"}, "config_groups: 'all'"),
        ({**compressed_settings("pack-quantized"), "config_groups": [1]}, r"config_groups: '\[1\]'"),
        ({**compressed_settings("pack-quantized"), "config_groups": {"a": 4}}, r"config_groups\.a: '4'"),
        ({**compressed_settings("pack-quantized"), "config_groups": {"a": {"weights": 4}}}, "weights: '4'"),
        ({**compressed_settings("pack-quantized"), "config_groups": {"a": None}}, "format|num_bits"),
        ({**compressed_settings("pack-quantized"), "sparsity_config": "2:4"}, "sparsity_config: '2:4'"),
        ({**compressed_settings("pack-quantized"), "transform_config": [1]}, r"transform_config: '\[1\]'"),
        ({**compressed_settings("pack-quantized"), "format": ["pack"]}, "format"),
        ({"quant_method": ["gptq"]}, "quantisation method"),
        ({**gptq_settings(), "bits": [4]}, "bits"),
        ({**gptq_settings(), "checkpoint_format": ["gptq"]}, "checkpoint_format"),
        ({**AWQ_SETTINGS, "version": ["gemm"]}, "version"),
        ({"quant_method": "fp8", "fmt": ["e4m3"]}, "fmt"),
        (compressed_settings("pack-quantized", actorder=["group"]), "actorder"),
        (compressed_settings("pack-quantized", num_bits="4"), "num_bits"),
        (float_settings(strategy=["tensor"]), "strategy"),
    ],
    ids=str,
)
def test_settings_of_another_kind_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        scheme({"quantization_config": settings})
