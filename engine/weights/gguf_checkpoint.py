"""A GGUF file as a checkpoint: its keys as a Hugging Face config, its tensors under Hugging Face names.

Knows the architectures llama (also Mistral), qwen2 and qwen3; imports no torch.
"""

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import Checkpoint
from ..spec import ModelError
from .gguf_file import GGUFFile, TensorInfo, open_gguf_file
from .mapped import digest_files
from .tensors import PackedTensor, TensorSource

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PERMUTED = ("llama",)  # q and k rows are interleaved in the file

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_CHECKED = {"attention.value_length", "rope.dimension_count", "vocab_size", "expert_count", "expert_used_count"}
_SCALING = {"type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings"}
_HARMLESS = {"rope.scaling.finetuned"}

# Fields that no key says: the tensors themselves do.
_BIASES = {
    "llama": {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
    "qwen3": {"attention_bias": "blk.0.attn_q.bias"},
}

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Checkpoint:
    """Raises ModelError naming the key or architecture that is not understood."""
    file = open_gguf_file(path)
    config = gguf_config(file)
    return Checkpoint(str(path), config, {}, lambda: GGUFReader(file, config))


class GGUFReader:
    """The tensors of a file, in the order of the file, still packed."""

    def __init__(self, file: GGUFFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"],
        }
        self._permuted = file.keys["general.architecture"] in _PERMUTED
        self._names = {hugging_face_name(name): info for name, info in file.tensors.items() if name != _ROPE_DIVISORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._names.items()}

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, TensorSource]]:
        for name, info in sorted(self._names.items(), key=lambda item: item[1].start):
            if name in wanted:
                yield name, PackedTensor(info.kind, info.shape, self._raw(name, info))
                self._file.release(info)

    def digest(self) -> str:
        return digest_files({self._file.path: [info.start for info in self._file.tensors.values()]})

    def _raw(self, name: str, info: TensorInfo) -> NDArray[np.uint8]:
        raw = self._file.raw(info)
        projection = name.split(".")[-2]
        if not self._permuted or projection not in self._heads:
            return raw
        return unpermute(raw.reshape(info.shape[0], -1), self._heads[projection]).reshape(raw.shape)


def unpermute(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Rows of q or k as the reference orders them: row 2i+j of a head in the file is row j*d/2+i. [rows, bytes]"""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def hugging_face_name(name: str) -> str:
    """A tensor's name here; one that is not known stays as it is and will be refused as unexpected."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else name


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The keys as config.json would say them."""
    name = file.keys.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{file.path}: GGUF architecture {name!r} is not supported (there are: {known})")
    values = {key.removeprefix(f"{name}."): value for key, value in file.keys.items() if key.startswith(f"{name}.")}
    _refuse_unknown(file, name, values)
    config = {field: values[key] for key, field in _FIELDS.items() if key in values}
    config["model_type"] = "mistral" if name == "llama" and "sliding_window" in config else name
    if "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config |= {field: True for field, tensor in _BIASES.get(name, {}).items() if tensor in file.tensors}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["eos_token_id"] = [
        file.keys[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in file.keys
    ]
    _check_head(file, name, values, config)
    _add_rope(file, values, config)
    return config


def _refuse_unknown(file: GGUFFile, name: str, values: Mapping[str, Any]) -> None:
    known = _FIELDS.keys() | _CHECKED | _HARMLESS | {f"rope.scaling.{key}" for key in _SCALING}
    for key, value in values.items():
        experts = key.startswith("expert_") and value
        if experts or (key not in known and value not in (0, 1.0, False)):
            raise ModelError(f"{file.path}: GGUF key {name}.{key} is not understood (value {str(value)[:60]})")
    if name != "llama" and values.get("attention.sliding_window"):
        raise ModelError(f"{file.path}: GGUF key {name}.attention.sliding_window is not understood")


def _check_head(file: GGUFFile, name: str, values: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    for field in ("hidden_size", "num_attention_heads"):
        if not isinstance(config.get(field), int):
            raise ModelError(f"{file.path}: GGUF has no usable {field} ({config.get(field)!r})")
    width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, width) != width:
            raise ModelError(f"{file.path}: GGUF key {name}.{key} is {values[key]}, but heads are {width} wide")


def _add_rope(file: GGUFFile, values: Mapping[str, Any], config: dict[str, Any]) -> None:
    """The scaling keys as a rope dict. Divisors of the frequencies (llama3) are what longrope calls its factors."""
    scaling = {_SCALING[key]: values[f"rope.scaling.{key}"] for key in _SCALING if f"rope.scaling.{key}" in values}
    kind = scaling.pop("rope_type", "none")
    if _ROPE_DIVISORS in file.tensors:
        if kind != "none":
            raise ModelError(f"{file.path}: has both {_ROPE_DIVISORS} and rope.scaling.type {kind!r}")
        config["rope_scaling"] = _divided(file, config["max_position_embeddings"])
    elif kind in ("linear", "yarn"):
        used = scaling if kind == "yarn" else {"factor": scaling.get("factor")}
        config["rope_scaling"] = {"rope_type": kind, **used}
    elif kind != "none":
        raise ModelError(
            f"{file.path}: GGUF rope.scaling.type {kind!r} is not supported (there are: none, linear, yarn)"
        )


def _divided(file: GGUFFile, context: int) -> dict[str, Any]:
    info = file.tensors[_ROPE_DIVISORS]
    if info.kind.name != "F32":
        raise ModelError(f"{file.path}: tensor {_ROPE_DIVISORS} is {info.kind.name}, not F32")
    divisors = file.raw(info).view(np.float32).ravel().tolist()
    factors = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
    return {"rope_type": "longrope", **factors, "original_max_position_embeddings": context}
