"""The small model that `make` fetches, and transformers run on the same file, read by the `gguf` package."""

import functools
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEADS = {"attn_q": 9, "attn_k": 3}


def demo_model_path() -> Path:
    """Where `make` puts the model; fails, saying how to get it, when it is not there."""
    assert DEMO_MODEL.is_file(), f"{DEMO_MODEL} is missing: run `make models`"
    return DEMO_MODEL


@functools.cache
def demo_reference() -> LlamaForCausalLM:
    """The model in transformers, float32, from the sizes of its model card and the file's dequantised tensors."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.load_state_dict(dict(map(_tensor, gguf.GGUFReader(demo_model_path()).tensors)), strict=False)
    model.tie_weights()
    rotary = model.model.rotary_emb
    rotary.inv_freq, _ = rotary.compute_default_rope_parameters(config)
    return model.float().eval()


def _tensor(tensor: gguf.ReaderTensor) -> tuple[str, torch.Tensor]:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    stem, _, suffix = tensor.name.rpartition(".")
    if not stem.startswith("blk."):
        return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[stem] + f".{suffix}", torch.tensor(
            values
        )
    _, layer, part = stem.split(".")
    if part in _HEADS:
        pairs = values.reshape(_HEADS[part], -1, 2, values.shape[1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return f"model.layers.{layer}.{_NAMES[part]}.{suffix}", torch.tensor(values)
