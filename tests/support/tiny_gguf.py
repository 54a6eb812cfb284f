"""Tiny GGUF files written with the `gguf` package from a Hugging Face folder: an oracle independent of our reader."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

Arrays = dict[str, np.ndarray]

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    folder: Path,
    target: Path,
    kind: Callable[[str], Kind] = lambda name: Kind.F32,
    *,
    keys: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Arrays:
    """Writes `folder` as GGUF, matrices in the block type `kind(hf name)`; returns the values the file then holds.

    `keys` adds or replaces keys (without the architecture's prefix when they start with a dot), `drop` leaves keys
    out, `tensors` adds float32 tensors under their GGUF names.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(target, arch)
    for name, value in {**_config_keys(config, arch), **_tokenizer_keys(folder), **(keys or {})}.items():
        if name not in drop:
            _add_key(writer, arch + name if name.startswith(".") else name, value)
    held = _add_tensors(writer, folder, config, arch, kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@torch.no_grad()
def held_logits(folder: Path, held: Arrays, prompt: list[int]) -> torch.Tensor:
    """transformers' logits with the values a GGUF file holds."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").float()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in held.items()}, strict=False)
    model.tie_weights()
    return model.eval()(torch.tensor([prompt]), use_cache=False).logits[0]


def random_blocks(kind: Kind, rows: int, columns: int, seed: int) -> np.ndarray:
    """[rows, bytes] of valid random blocks whose values are about 0.2 large."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // size, width), dtype=np.uint8)
    for start, scale in _SCALES[kind]:
        halves = (scale * generator.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
        blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == Kind.MXFP4:
        blocks[:, 0] = generator.integers(122, 126, len(blocks))  # the exponent of the scale
    return blocks.reshape(rows, -1)


# Where the float16 scales of a block lie, and a size for them.
_SCALES: dict[Kind, list[tuple[int, float]]] = {
    Kind.Q4_0: [(0, 0.04)],
    Kind.Q4_1: [(0, 0.04), (2, -0.3)],
    Kind.Q8_0: [(0, 0.003)],
    Kind.Q4_K: [(0, 0.0012), (2, 0.009)],
    Kind.Q6_K: [(208, 0.0002)],
    Kind.MXFP4: [],
}


def _add_tensors(
    writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], arch: str, kind: Callable[[str], Kind]
) -> Arrays:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    held: Arrays = {}
    for name, array in load_file(folder / "model.safetensors").items():
        chosen = kind(name) if array.ndim == 2 else Kind.F32
        packed, held[name] = _pack(array, chosen)
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            packed = _interleave(packed, heads[projection])
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(packed), raw_dtype=chosen)
    return held


def _pack(array: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """The packed form and the values it stands for."""
    if kind == Kind.F32:
        return array, array
    if kind in (Kind.Q6_K, Kind.Q4_K):  # the package cannot quantise to these
        packed = random_blocks(kind, *array.shape, seed=int(array.size))
    else:
        packed = gguf.quants.quantize(array, kind)
    return packed, gguf.quants.dequantize(packed, kind).reshape(array.shape).astype(np.float32)


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to q and k of arch llama: halves of a head become pairs."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{suffix}"


def _config_keys(config: dict[str, Any], arch: str) -> dict[str, Any]:
    keys = {
        ".block_count": config["num_hidden_layers"],
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": config["num_attention_heads"],
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        ".rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    width = config.get("head_dim")
    if width:
        keys |= {".attention.key_length": width, ".attention.value_length": width, ".rope.dimension_count": width}
    if config["model_type"] == "mistral" and config["sliding_window"]:
        keys[".attention.sliding_window"] = config["sliding_window"]
    return keys


def _tokenizer_keys(folder: Path) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "[PAD0]", "[PAD1]"],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens] + [5, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index(settings["bos_token"]),
        "tokenizer.ggml.eos_token_id": tokens.index(settings["eos_token"]),
        "tokenizer.ggml.add_bos_token": True,
    }
    if "chat_template" in settings:
        keys["tokenizer.chat_template"] = settings["chat_template"]
    return keys


def _add_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES = ["▁", "h", "i", "t", "e", "▁▁", "▁t", "he", "▁the", "hi", "▁hi", "[", "▁["]


def sentencepiece_keys(**more: Any) -> dict[str, Any]:
    """Keys of a SentencePiece-like tokenizer of 272 tokens; `more` are keys without their prefix."""
    scores = [0.0] * len(SENTENCEPIECE) + [-10.0 - len(PIECES) + len(piece) * 1.5 for piece in PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*SENTENCEPIECE, *PIECES],
        "tokenizer.ggml.scores": [score + index / 100 for index, score in enumerate(scores)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }
