"""Factors that 8-bit weights are balanced by: what they save, and that a model's own inputs decide them."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from tiny_gguf import write_gguf

from batchgen import kernels
from batchgen.engine.balance import STEPS, Balance, WatchedFormat, balancing
from batchgen.engine.checkpoint import Checkpoint, open_checkpoint
from batchgen.engine.decoder import Decoder, Embedding, build_layer, load_decoder
from batchgen.engine.kv import KVPages
from batchgen.engine.models import architecture
from batchgen.engine.weights.load import HEAD, Target, fill_parts, model_places

OPS, CPU = kernels.load("cpu"), torch.device("cpu")
strengths = st.lists(st.floats(0.01, 100), min_size=8, max_size=8).map(torch.tensor)


@given(strengths, strengths)
def test_the_error_of_a_product_is_the_least_but_for_the_steps(columns: torch.Tensor, inputs: torch.Tensor) -> None:
    """Weight and inputs of one row each: their strengths are known. The squares of the factors are off by a step's half
    each way, so the product of both sums exceeds the least one by no more than Kantorovich's inequality says.
    """
    factors = balancing(columns.unsqueeze(0), inputs.unsqueeze(0))
    error = (columns / factors).square().sum() * (inputs * factors).square().sum()
    off = 2 ** (1 / STEPS)
    assert error <= 1.0001 * ((off + 1 / off) / 2) ** 2 * (columns * inputs).sum().square()
    steps = factors.log2() * STEPS
    torch.testing.assert_close(steps, steps.round())


@given(strengths, st.sampled_from([0.0, 1e-30, torch.inf, torch.nan]), st.booleans())
def test_inputs_that_are_never_seen_or_not_finite(others: torch.Tensor, odd: float, of_weight: bool) -> None:
    given = others.clone()
    given[3] = odd
    pair = (given, others) if of_weight else (others, given)
    factors = balancing(*(side.unsqueeze(0) for side in pair))
    assert factors.isfinite().all()
    assert (factors > 0).all()
    assert (factors == 1).all() or odd < 1


def balance_of(checkpoint: Checkpoint) -> Balance:
    family = architecture(checkpoint.config)
    spec = family.spec(checkpoint.config)
    plan = family.weights(spec)
    places = model_places(checkpoint.reader, plan, spec.tied)
    return Balance(spec, checkpoint.reader, places, plan, OPS, torch.float32, CPU, build_layer)


@pytest.mark.parametrize("family", ["llama3", "smollm2", "qwen2", "qwen3", "mistral"])
def test_layer_by_layer_inputs_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    balance = balance_of(open_checkpoint(str(tiny_model(family, tmp_path))))
    balance("head")
    found: dict[str, torch.Tensor] = {}
    target = Target(WatchedFormat(torch.float32, CPU, found), torch.float32, CPU)
    parts = fill_parts(balance.reader, balance.places, balance.plan, target)
    head = parts.linear("head")
    rows = parts.vector("embedding").__getitem__ if HEAD in balance.places else head.rows
    model = Decoder(balance.spec, parts, head, OPS, Embedding(rows, torch.float32, CPU))
    batch, pages = balance._batch()
    model.logits(model.forward(batch, KVPages(model.kv_shape(), pages.num_blocks, pages.block_size, CPU)))
    assert found.keys() == balance._found.keys() == balance.plan.linears.keys()
    for part, factors in found.items():
        torch.testing.assert_close(factors, balance(part), msg=part)
        assert (factors != 1).any()


@pytest.mark.parametrize(
    ("kind", "weights", "asked"),
    [(Kind.F16, "int8", True), (Kind.Q8_0, "int8", True), (Kind.Q8_0, "int4", False), (Kind.Q4_0, "int4", False)],
)
def test_factors_are_found_only_where_something_is_turned(
    kind: Kind, weights: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tiny_model("llama2", tmp_path / "model"), tmp_path / "model.gguf", lambda name: kind)
    calls = []
    measure = Balance._measure
    monkeypatch.setattr(Balance, "_measure", lambda self: (calls.append(self), measure(self))[1])
    load_decoder(open_checkpoint(str(tmp_path / "model.gguf")), torch.bfloat16, CPU, OPS, weights)
    assert len(calls) == asked
