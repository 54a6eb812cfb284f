"""When several queries read keys together: by costs that are measured where a job was calibrated, else built in."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine import Engine
from batchgen.engine.device import place_of
from batchgen.engine.rates import built_in
from batchgen.engine.rates_cache import cache_file, entry_name, keep_rates
from batchgen.engine.sharing import BUILT_IN, Sharing, fitted

COST = st.floats(0, 100)
POINTS = (4, 512), (32, 128), (32, 512)


@given(st.builds(Sharing, COST, COST, COST))
def test_measured_shares_give_the_costs_behind_them(costs: Sharing) -> None:
    found = fitted({(q, k): costs.key / q + costs.read + costs.result / k for q, k in POINTS})
    for name in ("key", "read", "result"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), abs=1e-6, rel=1e-6)


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3))
def test_noise_makes_no_cost_negative(shares: list[float]) -> None:
    found = fitted(dict(zip(POINTS, shares, strict=True)))
    assert min(found.key, found.read, found.result) >= 0


def test_points_that_tell_nothing_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="no corner"):
        fitted({(4, 512): 1.0, (32, 128): 1.0, (16, 512): 1.0})


@given(st.builds(Sharing, st.floats(0, 4), st.floats(0, 2), COST), st.integers(1, 500), st.integers(1, 5000))
def test_what_pays_still_pays_for_more_keys(costs: Sharing, queries: int, keys: int) -> None:
    assert costs.pays(queries, 2 * keys) or not costs.pays(queries, keys)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_query_alone_never_pays(kind: str) -> None:
    assert not any(BUILT_IN[kind].pays(1, keys) for keys in (1, 64, 10**6))


def test_small_groups_pay_behind_long_prefixes() -> None:
    """As measured on a CPU: 4 queries gain 1.4 times with 512 keys, and nothing with 64."""
    assert BUILT_IN["cpu"].pays(4, 512)
    assert not BUILT_IN["cpu"].pays(4, 64)
    assert BUILT_IN["cuda"].pays(2, 256)


def test_an_engine_shares_by_what_was_measured_on_its_device(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = str(tiny.tiny_model("llama3", tmp_path / "model"))

    def costs(**settings: str) -> Sharing:
        return Engine.load(model, device="cpu", dtype="float32", memory="1MiB", **settings)._runner.sharing

    assert costs() == BUILT_IN["cpu"]
    spec, measured = Engine.load(model, device="cpu", dtype="float32", memory="1MiB").model.spec, Sharing(1.0, 2.0, 3.0)
    rates = built_in(spec, "float32")
    rates = replace(rates, sharing={**rates.sharing, "float32": measured})
    keep_rates(cache_file(), entry_name(spec, "float32", place_of(torch.device("cpu"))), rates)
    assert costs() == measured
    assert costs(kv_cache="int8") == BUILT_IN["cpu"]
