"""Sampling parameters and requests refuse what they cannot mean, naming the field."""

import pytest

from batchgen.engine.request import MAX_KEY, Request, Sampling


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"top_p": 2}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": "abc"}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
    ],
)
def test_a_value_out_of_range_is_named(values, field):
    with pytest.raises(ValueError, match=f"^{field}: "):
        Sampling(**values)


def test_lists_are_taken_as_tuples():
    sampling = Sampling(stop=["a"], stop_token_ids=[1])
    assert (sampling.stop, sampling.stop_token_ids) == (("a",), (1,))
    assert hash(sampling) == hash(Sampling(stop=("a",), stop_token_ids=(1,)))


def test_a_key_is_an_integer():
    with pytest.raises(ValueError, match=r"^key: must be an integer, got 'a'"):
        Request("a", [1])


@pytest.mark.parametrize("key", [-1, 2**63, 2**64, True])
def test_a_key_out_of_range_is_refused(key):
    with pytest.raises(ValueError, match=r"^key: must be "):
        Request(key, [1])


def test_the_largest_key_is_legal():
    assert Request(MAX_KEY, [1]).key == 2**63 - 1
