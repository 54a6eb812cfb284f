"""The engine on the Triton kernels, in the interpreter: the reference's tokens in every family, format and KV type.

One step ahead and with recorded steps, so that attention plans are refilled in place as captured graphs need them.
"""

import pytest
import tiny
from interpreted_engine import CACHES, NATIVE, PLAIN, TRITON, answers, plan

pytestmark = pytest.mark.slow

EXACT = [one for one in plan() if one[1:] == NATIVE]


@pytest.mark.parametrize(("family", "weights", "kv_cache"), EXACT)
def test_every_family_in_float32_gives_the_reference_s_tokens(family, weights, kv_cache):
    here, there = (answers()[family, weights, kv_cache, table] for table in (TRITON, PLAIN))
    assert here.tokens == there.tokens
    for mine, theirs in zip(here.logprobs, there.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-3)
    assert here.recorded > 0


@pytest.mark.parametrize(("weights", "kv_cache"), CACHES)
def test_every_kv_type_reads_what_it_wrote(weights, kv_cache):
    here, there = (answers()["llama3", weights, kv_cache, table] for table in (TRITON, PLAIN))
    assert here.tokens == there.tokens
    for mine, theirs in zip(here.logprobs, there.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-3)


@pytest.mark.parametrize(("family", "weights", "kv_cache"), tiny.CROSSED)
def test_every_pair_of_formats_comes_to_the_reference_that_rounds_alike(family, weights, kv_cache):
    """First tokens: a code next to a tie may be another, and with it what follows."""
    here, there = (answers()[family, weights, kv_cache, table] for table in (TRITON, PLAIN))
    for mine, theirs in zip(here.logprobs, there.logprobs, strict=True):
        assert mine[0] == pytest.approx(theirs[0], abs=0.03)
