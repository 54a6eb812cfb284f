"""Frequencies and factors of every RoPE type equal transformers' own, and configs in every spelling mean the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from batchgen.engine.models import architecture
from batchgen.engine.rope import Rope, rope_frequencies
from batchgen.engine.spec import ModelError, RopeSpec
from batchgen.kernels.tables import ReferenceKernels

CONTEXT, WIDTH = 512, 32
DIVISORS = [1.0 + index / 7 for index in range(WIDTH // 2)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": DIVISORS, "long_factor": DIVISORS[::-1], "original_max_position_embeddings": 128}

CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.9},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "longrope", **LONG, "factor": 2.0},
    {"rope_type": "longrope", **LONG, "attention_factor": 1.3},
]


def config(**fields: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "head_dim": WIDTH, "max_position_embeddings": CONTEXT}
    return {"model_type": "llama", **sizes, **heads, **fields}


def rope(**fields: Any) -> RopeSpec:
    settings = config(**fields)
    return architecture(settings).spec(settings).rope


@pytest.mark.parametrize("length", [1, 128, 129, 600])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["rope_type"])
def test_frequencies_equal_the_reference(case: dict[str, Any], length: int) -> None:
    reference = LlamaConfig(**config(rope_parameters={"rope_theta": 5000.0, **case}))
    if case["rope_type"] == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(reference)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[case["rope_type"]](reference, seq_len=length)
    frequencies, own_factor = rope_frequencies(rope(rope_parameters={"rope_theta": 5000.0, **case}), length)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-12)


def test_default_frequencies_are_bit_equal() -> None:
    reference = LlamaRotaryEmbedding(LlamaConfig(**config()))
    assert torch.equal(rope_frequencies(rope(), 1)[0], reference.inv_freq)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0}},
        {"rope_theta": 700.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0},
        },
    ],
)
def test_every_spelling_means_the_same(fields: dict[str, Any]) -> None:
    assert rope(**fields) == RopeSpec("linear", 700.0, WIDTH, CONTEXT, {"factor": 2.0})


def test_missing_theta_is_ten_thousand() -> None:
    assert rope().theta == 10_000.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "'spiral'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 3}}, "'twist'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "disagree"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}}, "factor"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 2.0}}}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "longrope", **LONG, "long_factor": [1.0]}}, "long_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        rope(**fields)


def test_longrope_chooses_once_per_row() -> None:
    table = Rope(
        rope(rope_parameters={"rope_type": "longrope", **LONG}), CONTEXT, torch.device("cpu"), ReferenceKernels()
    )
    assert [table.choice(length) for length in (1, 128, 129, CONTEXT)] == [0, 0, 1, 1]
    positions = torch.tensor([5, 5])
    cos, _ = table.rows(positions, torch.tensor([0, 1]))
    spec = rope(rope_parameters={"rope_type": "longrope", **LONG})
    for row, length in enumerate((128, 129)):
        frequencies, factor = rope_frequencies(spec, length)
        torch.testing.assert_close(cos[row], (5 * frequencies).cos() * factor)
    assert not torch.allclose(cos[0], cos[1])


def test_dynamic_changes_nothing_up_to_the_context() -> None:
    """Longer rows are refused (code context_length), so the one table is exact for every row that runs."""
    spec = rope(rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    plain, _ = rope_frequencies(rope(), CONTEXT)
    torch.testing.assert_close(rope_frequencies(spec, CONTEXT)[0], plain, rtol=1e-6, atol=0)
    assert not torch.allclose(rope_frequencies(spec, CONTEXT + 100)[0], plain, rtol=1e-3)
    assert Rope(spec, CONTEXT, torch.device("cpu"), ReferenceKernels()).choice(CONTEXT) == 0


def test_original_context_at_the_top_level_wins(tmp_path: Path) -> None:
    inner = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    spec = rope(rope_scaling=inner, original_max_position_embeddings=64)
    assert spec.parameters["original_max_position_embeddings"] == 64
