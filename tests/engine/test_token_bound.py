"""The fewest tokens of a text: a bound that no text breaks, and none where there is no such thing."""

import functools
import json
from typing import Any

import pytest
from demo_model import demo_model_path
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.token_bound import TokenBound, token_bound
from batchgen.engine.tokenizer import Tokenizer, load_tokenizer

ALPHABET = [chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
SPELLED = {character: at for at, character in enumerate([*ALPHABET, "abc"])}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def serialised(**changes: Any) -> str:
    whole = {
        "normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}, "truncation": None,
        "model": {"type": "BPE", "byte_fallback": False, "vocab": SPELLED},
        "added_tokens": [{"content": "<long>", "lstrip": False, "rstrip": False}], **changes,
    }  # fmt: skip
    return json.dumps(whole)


def without(*characters: str) -> dict[str, Any]:
    vocabulary = {name: at for name, at in SPELLED.items() if name not in characters}
    return {"model": {"type": "BPE", "byte_fallback": False, "vocab": vocabulary}}


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, TokenBound(6)),
        (without("a", "\u0100"), TokenBound(6, "\0a")),
        (without("\u0122"), TokenBound(0)),
        ({"normalizer": {"type": "NFC"}}, TokenBound(24)),
        ({"normalizer": {"type": "NFKC"}}, TokenBound(0)),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"}, {"type": "NFC"}]}}, TokenBound(24)),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, TokenBound(6)),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}}, TokenBound(0)),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, TokenBound(0)),
        ({"pre_tokenizer": {"type": "Whitespace"}}, TokenBound(0)),
        ({"pre_tokenizer": None}, TokenBound(0)),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Removed"}}, TokenBound(0)),
        ({"truncation": {"max_length": 5}}, TokenBound(0)),
        ({"added_tokens": [{"content": "<m>", "lstrip": True, "rstrip": False}]}, TokenBound(0)),
        ({"model": {"type": "Unigram", "vocab": []}}, TokenBound(0)),
        ({"pre_tokenizer": None, "model": {"type": "BPE", "byte_fallback": True, "vocab": BYTES}}, TokenBound(6)),
        ({"pre_tokenizer": None, "model": {"type": "BPE", "byte_fallback": True, "vocab": SPELLED}}, TokenBound(0)),
    ],
)
def test_what_can_be_said_for_sure(changes: dict[str, Any], bound: TokenBound) -> None:
    assert token_bound(serialised(**changes)) == bound


TEXTS = [
    st.text(max_size=200),
    st.text("a \n\t=-_\x1d", max_size=400),
    st.text("\u0301e\U0001f600\U00050000", max_size=60),
]


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(TEXTS), repeats=st.integers(1, 40))
def test_no_text_of_the_small_model_breaks_the_bound(text: str, repeats: int) -> None:
    [tokens] = small_tokenizer().encode([text * repeats], add_special_tokens=False)
    assert len(tokens) >= small_tokenizer().fewest_tokens(text * repeats)


def test_the_bound_of_the_small_model_says_something() -> None:
    assert small_tokenizer().fewest_tokens("word " * 81_000) == 5000


@functools.cache
def small_tokenizer() -> Tokenizer:
    return load_tokenizer(str(demo_model_path()))
