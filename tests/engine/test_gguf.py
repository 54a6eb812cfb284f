"""GGUF against the `gguf` package: block arithmetic bit for bit, whole models, and refusals by name."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from forward import load, prompt_logits
from gguf import GGMLQuantizationType as Kind
from tiny import random_prompt, reference_logits, tiny_model
from tiny_gguf import held_logits, random_blocks, write_gguf

from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.spec import ModelError
from batchgen.engine.weights.blocks import BLOCK_TYPES
from batchgen.engine.weights.gguf_checkpoint import unpermute
from batchgen.engine.weights.gguf_file import GGUFFile
from batchgen.engine.weights.tensors import PackedTensor

PROMPT = random_prompt(40, 3)
PACKED = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q6_K, Kind.Q4_K, Kind.MXFP4]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *PACKED], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(7, 768), (1, 256), (700, 1024)])
def test_expansion_is_bit_equal(kind: Kind, shape: tuple[int, int]) -> None:
    plain = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    packed = random_blocks(kind, *shape, seed=2) if kind in PACKED else gguf.quants.quantize(plain, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, kind).astype(np.float32).reshape(shape))
    raw = np.ascontiguousarray(packed).view(np.uint8).reshape(shape[0], -1)
    source = PackedTensor(BLOCK_TYPES[kind.value], shape, raw)
    assert torch.equal(source.dequantise(torch.float32), expected)
    assert torch.equal(source.dequantise(torch.bfloat16), expected.bfloat16())
    assert torch.equal(torch.cat(list(source.float_rows())), expected)


def test_unpermute_by_its_definition() -> None:
    heads, width = 3, 8
    file = np.arange(heads * width, dtype=np.uint8)[:, None]
    ours = unpermute(file, heads)
    for head in range(heads):
        for i in range(width // 2):
            for j in range(2):
                assert ours[head * width + j * width // 2 + i] == file[head * width + 2 * i + j]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *PACKED], ids=lambda kind: kind.name)
def test_models_in_every_block_type(kind: Kind, tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model", **WIDE)
    held = write_gguf(folder, tmp_path / "model.gguf", lambda name: kind)
    own = prompt_logits(load(tmp_path / "model.gguf"), [PROMPT])[0]
    torch.testing.assert_close(own, held_logits(folder, held, PROMPT), rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama2", {"head_dim": None}),
        ("smollm2", {"num_hidden_layers": 3}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("llama2", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_every_architecture(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path / "model", **overrides)
    mixed = {"embed_tokens": Kind.Q8_0, "v_proj": Kind.Q8_0, "down_proj": Kind.F16}
    held = write_gguf(
        folder, tmp_path / "model.gguf", lambda name: next((k for part, k in mixed.items() if part in name), Kind.Q4_1)
    )
    own = prompt_logits(load(tmp_path / "model.gguf"), [PROMPT])[0]
    torch.testing.assert_close(own, held_logits(folder, held, PROMPT), rtol=1e-4, atol=3e-4)


def test_rope_divisors_replace_the_formula(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder))
    plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    write_gguf(folder, tmp_path / "model.gguf", tensors={"rope_freqs.weight": (plain / scaled).numpy()})
    own = prompt_logits(load(tmp_path / "model.gguf"), [PROMPT])[0]
    torch.testing.assert_close(own, reference_logits(folder, PROMPT), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 16,
                ".rope.scaling.finetuned": True,
            },
        ),
    ],
)
def test_rope_scaling_keys(rope: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_model("qwen2", tmp_path / "model", rope_parameters={"rope_theta": 10_000.0, **rope})
    write_gguf(folder, tmp_path / "model.gguf", keys=keys)
    own = prompt_logits(load(tmp_path / "model.gguf"), [PROMPT])[0]
    torch.testing.assert_close(own, reference_logits(folder, PROMPT), rtol=1e-4, atol=1e-4)


def test_packed_blocks_stay_reachable(tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", lambda name: Kind.Q4_1)
    reader = open_checkpoint(str(tmp_path / "model.gguf")).reader
    name = "model.layers.1.mlp.up_proj.weight"
    (found,) = [source for _, source in reader.tensors({name})]
    assert isinstance(found, PackedTensor)
    assert (found.kind.name, found.shape, found.raw.shape) == ("Q4_1", (96, 64), (96, 64 // 32 * 20))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"general.architecture": "rwkv6"}, "'rwkv6'"),
        ({"split.count": 3}, r"split\.count"),
        ({".expert_count": 8, ".expert_used_count": 2}, r"llama\.expert_count"),
        ({".attention.value_length": 48}, r"attention\.value_length"),
        ({".rope.dimension_count": 8}, r"rope\.dimension_count"),
        ({".rope.scaling.type": "longrope"}, "'longrope'"),
        ({".attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv"),
        ({".logit_scale": 0.5}, r"llama\.logit_scale"),
        ({".attention.head_count": [4, 4]}, "num_attention_heads"),
    ],
)
def test_keys_that_are_not_understood_are_refused(keys: Mapping[str, Any], named: str, tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", keys=keys)
    with pytest.raises(ModelError, match=named) as caught:
        load(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)


def test_tensors_that_are_not_understood_are_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model")
    for name, named in [("blk.0.attn_q_norm.weight", "q_norm"), ("blk.0.strange.weight", "blk.0.strange.weight")]:
        write_gguf(folder, tmp_path / "model.gguf", tensors={name: np.ones(16, np.float32)})
        with pytest.raises(ModelError, match=f"not in this model: .*{named}"):
            load(tmp_path / "model.gguf")


def test_an_unknown_block_type_is_named(tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", lambda name: Kind.Q5_0 if "layers.1.mlp.up" in name else Kind.Q4_0)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_up\.weight has GGUF type 6"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("cut", [2, 20, 3000, -64])
def test_a_cut_file_is_named(cut: int, tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model")
    path = tmp_path / "model.gguf"
    write_gguf(folder, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"model\.gguf"):
        load(path)


@pytest.mark.parametrize(("offset", "data", "named"), [(0, b"GGML", "not a GGUF"), (4, b"\x01", "version 1")])
def test_other_files_are_refused(offset: int, data: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama2", tmp_path / "model"), path)
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)
    with pytest.raises(ModelError, match=named):
        load(path)


def test_end_tokens(tmp_path: Path) -> None:
    folder = tiny_model("llama2", tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", keys={"tokenizer.ggml.eot_token_id": 5})
    assert open_checkpoint(str(tmp_path / "model.gguf")).eos_ids == {2, 5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("general.alignment", 0),
        ("general.alignment", "32"),
        ("general.alignment", [32]),
        ("split.count", "three"),
        ("split.count", 1.0),
    ],
)
def test_counts_that_are_none_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _header_only(path, name, value)
    with pytest.raises(ModelError, match=rf"model\.gguf: key {name} must be a whole number"):
        GGUFFile(path)


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IQ", 9, 1) * 100_000)
    with pytest.raises(ModelError, match="damaged"):
        GGUFFile(path)


def test_a_shape_beyond_all_files_is_refused(tmp_path: Path) -> None:
    """Its number of bytes is no multiple of 2**64, though 64-bit arithmetic would find one."""
    path = tmp_path / "model.gguf"
    info = struct.pack("<Q", 1) + b"a" + struct.pack("<IQQQIQ", 3, 1, 2**32, 2**32, 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info)
    with pytest.raises(ModelError, match="cut short inside tensor a"):
        GGUFFile(path)


def _header_only(path: Path, name: str, value: Any) -> None:
    kinds = {int: (4, "<I"), float: (6, "<f")}
    if isinstance(value, str):
        written = struct.pack("<IQ", 8, len(value)) + value.encode()
    elif isinstance(value, list):
        written = struct.pack("<IIQI", 9, 4, 1, *value)
    else:
        kind, form = kinds[type(value)]
        written = struct.pack("<I", kind) + struct.pack(form, value)
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name.encode() + written + bytes(64)
    )
