"""Tiny random models and tokenizers, written to a folder as a user's checkpoint would be, and their reference answers.

The weights have a large scale and the embeddings unit scale, so that greedy text depends on every part of the context.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 300  # head rows; the tokenizer is a little smaller, as real ones often are
SPECIAL_TOKENS = ("<|unk|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS, EOS, TURN_END = 1, 2, 5

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
}

# Every quantised weight with every quantised KV cache, over all families.
CROSSED = (
    ("llama2", "int8", "fp8"),
    ("llama3", "int4", "int8"),
    ("smollm2", "fp8", "int4"),
    ("mistral", "int8", "int4"),
    ("qwen2", "int4", "fp8"),
    ("qwen3", "fp8", "int8"),
    ("mistral", "fp8", "fp8"),
    ("qwen2", "int8", "int8"),
    ("qwen3", "int4", "int4"),
)


def tiny_model(family: str, folder: Path, *, chat_template: bool = True, seed: int = 0, **overrides: Any) -> Path:
    """Writes config, safetensors, tokenizer and generation config of a tiny random model; returns the folder.

    `overrides` are config fields. A family is a key of FAMILIES.
    """
    settings = {**_COMMON, **FAMILIES[family], **overrides}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    model.generation_config.eos_token_id = [EOS, TURN_END]
    model.save_pretrained(folder)
    tiny_tokenizer(folder, chat_template=chat_template)
    return folder


def tiny_tokenizer(folder: Path, *, chat_template: bool = True) -> Path:
    """Writes a byte-level BPE tokenizer of 288 tokens, the first ones special; it adds BOS. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "unk_token": "<|unk|>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "tokenizer.json").write_text(_byte_level_bpe().to_str(), encoding="utf-8")
    return folder


@functools.cache
def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint in transformers, on the CPU, plain attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def reference_logits(folder: Path, prompt: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[len(prompt), V] float32: the logits after every token of the prompt, computed in `dtype`."""
    return reference_model(folder, dtype)(torch.tensor([list(prompt)]), use_cache=False).logits[0].float()


def reference_greedy(folder: Path, prompt: Sequence[int], max_tokens: int, *, allowed: int | None = None) -> list[int]:
    """The greedy continuation, computed without a cache; stops after an end token. Ids from `allowed` on are masked."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(reference_logits(folder, tokens)[-1, :allowed].argmax()))
        if tokens[-1] in (EOS, TURN_END):
            break
    return tokens[len(prompt) :]


def random_prompt(length: int, seed: int = 0, size: int = 280) -> list[int]:
    """Ordinary tokens only: no special ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL_TOKENS), size, (length,), generator=generator).tolist()


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif "embed_tokens" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(0.25 * noise)


@functools.cache
def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = "the quick brown fox jumps over the lazy dog and then the other one that was there, with the rest of them"
    tokenizer.train_from_iterator([words] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer
