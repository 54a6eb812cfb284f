"""How few tokens a text can have, told from its characters, where a tokenizer's parts let that be said for sure.

Knows the serialised form of the `tokenizers` library; loads nothing.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Sequence", "Split")  # pre-tokenizers that drop no character
_COMPOSED = 4  # a character decomposes into four at most (Unicode Standard Annex 15), so NFC joins no more
_VISIBLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])  # bytes that stand for themselves


@dataclass(frozen=True)
class TokenBound:
    """A token stands for `most` characters at most (0: not known), and those in `dropped` may have none."""

    most: int
    dropped: str = ""

    def fewest(self, text: str) -> int:
        """No fewer tokens than these has the text."""
        if not self.most or len(text) <= self.most:
            return 0
        kept = len(text) - sum(text.count(character) for character in self.dropped)
        return -(-kept // self.most)


def token_bound(serialised: str) -> TokenBound:
    """The bound of a tokenizer; one that says nothing where it may drop or join text of any length."""
    tokenizer = json.loads(serialised)
    factor, dropped, added = _factor(tokenizer["normalizer"]), _dropped(tokenizer), tokenizer["added_tokens"]
    if not factor or dropped is None or any(token["lstrip"] or token["rstrip"] for token in added):
        return TokenBound(0)  # tokens that strip take any amount of blanks
    longest = max(map(len, [*tokenizer["model"]["vocab"], *(token["content"] for token in added)]))
    return TokenBound(factor * longest, dropped)


def _factor(normalizer: dict[str, Any] | None) -> int:
    """How many characters may become one before the text is cut into tokens; 0: any number."""
    if normalizer is None or normalizer["type"] in ("ByteLevel", "Prepend"):
        return 1
    if normalizer["type"] == "NFC":
        return _COMPOSED
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return int(bool(pattern) and len(normalizer["content"]) >= len(pattern))
    if normalizer["type"] != "Sequence":
        return 0
    total = 1
    for part in normalizer["normalizers"]:
        total *= _factor(part)
    return total


def _dropped(tokenizer: dict[str, Any]) -> str | None:
    """Characters that no token stands for; None when that cannot be told, or some are many in one token."""
    model, parts = tokenizer["model"], list(_parts(tokenizer["pre_tokenizer"]))
    if model["type"] != "BPE" or tokenizer["truncation"] is not None:
        return None
    if not all(part["type"] in _KEEPING and part.get("behavior") != "Removed" for part in parts):
        return None
    if any(part["type"] == "ByteLevel" for part in [*parts, tokenizer["normalizer"] or {"type": ""}]):
        return _without_token(model["vocab"])
    fallback = model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return "" if fallback else None


def _without_token(vocabulary: Collection[str]) -> str | None:
    """ASCII characters whose byte has no token. Others have one while every byte that continues a character has."""
    missing = [byte for byte, spelled in enumerate(_spelled_bytes()) if spelled not in vocabulary]
    if any(0x80 <= byte < 0xC0 for byte in missing):
        return None
    return "".join(chr(byte) for byte in missing if byte < 0x80)


def _spelled_bytes() -> list[str]:
    """The character that byte-level vocabularies write for each byte, as GPT-2 has them."""
    hidden = iter(range(256))
    return [chr(byte) if byte in _VISIBLE else chr(256 + next(hidden)) for byte in range(256)]


def _parts(pre_tokenizer: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if pre_tokenizer is not None:
        yield pre_tokenizer
        for part in pre_tokenizer.get("pretokenizers", ()):
            yield from _parts(part)
