"""Every family's logits equal transformers' in float32, and dropping any of its peculiarities shows."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forward import load, prompt_logits
from tiny import FAMILIES, random_prompt, reference_logits, tiny_model

from batchgen.engine.decoder import Decoder
from batchgen.engine.linear import Linear
from batchgen.engine.models import architecture
from batchgen.engine.spec import ModelError

PROMPTS = [random_prompt(length, length) for length in (1, 5, 8, 9, 33, 70)]
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + index / 5 for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": 40,
}

VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    *((family, family, {}) for family in FAMILIES),
    ("llama with biases", "llama2", {"attention_bias": True, "mlp_bias": True}),
    ("odd shapes", "llama3", {"hidden_size": 60, "intermediate_size": 77, "head_dim": 22, "num_attention_heads": 6}),
    ("one kv head", "smollm2", {"num_key_value_heads": 1, "num_hidden_layers": 3}),
    ("mistral without window", "mistral", {"sliding_window": None}),
    ("qwen2 sliding from layer 1", "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    (
        "qwen3 sliding by layer_types",
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    ("qwen3 with biases", "qwen3", {"attention_bias": True}),
    ("qwen2 tied", "qwen2", {"tie_word_embeddings": True}),
    ("linear rope", "llama2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 3.0}}),
    ("yarn rope", "qwen2", {"rope_parameters": YARN}),
    ("longrope", "llama2", {"rope_parameters": LONG}),
    ("dynamic rope", "llama2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
]


@pytest.mark.parametrize(("family", "overrides"), [variant[1:] for variant in VARIANTS], ids=[v[0] for v in VARIANTS])
def test_logits_equal_transformers(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path / "model", **overrides)
    for own, prompt in zip(prompt_logits(load(folder), PROMPTS), PROMPTS, strict=True):
        check_equal(own, folder, prompt)


def check_equal(own: torch.Tensor, folder: Path, prompt: Sequence[int]) -> None:
    """Close in value, and the same best token wherever the reference is not tied.

    Some random models magnify rounding: what transformers' float32 is off from its float64 is allowed here as well.
    """
    expected = reference_logits(folder, prompt)
    noise = float((expected - reference_logits(folder, prompt, torch.float64)).abs().max())
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4 + 2 * noise)
    best, second = expected.topk(2, dim=-1).values.unbind(-1)
    clear = best - second > 1e-4
    assert clear.sum() >= 0.9 * len(clear)
    assert torch.equal(own.argmax(-1)[clear], expected.argmax(-1)[clear])


def without_bias(linear: Linear) -> Linear:
    """What it adds to nothing taken off."""
    return lambda x: linear(x) - linear(torch.zeros_like(x))  # type: ignore[return-value]


def mutated(decoder: Decoder, what: str) -> Decoder:
    """The decoder with one peculiarity of its family taken out."""
    layers = []
    for attention, mlp in decoder._layers:
        if what == "window":
            attention = dataclasses.replace(attention, masking=dataclasses.replace(attention.masking, window=None))
        elif what == "bias":
            attention = dataclasses.replace(attention, qkv=without_bias(attention.qkv))
        elif what == "norms":
            attention = dataclasses.replace(attention, query_norm=lambda x: x)
        elif what == "scale":
            attention = dataclasses.replace(attention, masking=dataclasses.replace(attention.masking, scale=0.2))
        layers.append((attention, mlp))
    decoder._layers = layers
    return decoder


@pytest.mark.parametrize(
    ("family", "what"), [("mistral", "window"), ("qwen2", "bias"), ("qwen3", "norms"), ("smollm2", "scale")]
)
def test_a_dropped_peculiarity_is_seen(family: str, what: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path / "model")
    own = prompt_logits(mutated(load(folder), what), [PROMPTS[-1]])[0]
    with pytest.raises(AssertionError):
        check_equal(own, folder, PROMPTS[-1])


def test_a_shifted_position_is_seen(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    decoder = load(folder)
    rows = decoder._rope.rows
    decoder._rope.rows = lambda positions, choice: rows((positions * 1.02).long(), choice)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        check_equal(prompt_logits(decoder, [PROMPTS[-1]])[0], folder, PROMPTS[-1])


def test_bfloat16_stays_near(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    own = prompt_logits(load(folder, torch.bfloat16), [PROMPTS[-1]])[0]
    expected = reference_logits(folder, PROMPTS[-1])
    assert own.dtype == torch.float32
    assert (own - expected).norm() / expected.norm() < 0.05


SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
BASE = {"model_type": "llama", **SIZES, "num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings: 1099511627776, beyond"),
        ({"hidden_size": 66}, "head_dim"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"logit_scale": 0.25}, "logit_scale"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits: '3'"),
        ({"quantization_config": {"quant_method": "awq"}}, "w_bit: 'None'"),
        ({"quantization_config": {"quant_method": "quark"}}, "'quark'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "config_groups: '0 groups'"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes'"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    config = {**BASE, **fields}
    with pytest.raises(ModelError, match=named) as caught:
        architecture(config).spec(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["LlamaForCausalLM"], "attention_dropout": 0.1, "use_cache": True, "bos_token_id": 7},
        {"some_new_field": None, "another": False, "third": 0, "fourth": 1.0},
        {"auto_map": {"AutoModel": "evil.Model"}, "transformers_version": "4.40.0", "pretraining_tp": 2},
        {"layer_types": ["full_attention", "full_attention"]},
        {"hidden_act": "silu", "head_dim": None, "num_key_value_heads": None},
    ],
)
def test_harmless_fields_pass(fields: dict[str, Any]) -> None:
    config = {**BASE, **fields}
    assert architecture(config).spec(config) == architecture(BASE).spec(BASE)


def test_defaults_of_the_classes() -> None:
    mistral = {**BASE, "model_type": "mistral"}
    assert architecture(mistral).spec(mistral).windows == (4096, 4096)
    assert architecture(BASE).spec(BASE).num_kv_heads == 4
    qwen = {**BASE, "model_type": "qwen3"}
    assert architecture(qwen).spec(qwen).head_dim == 128
