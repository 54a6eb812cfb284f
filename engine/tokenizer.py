"""Text to token ids and back, for any checkpoint: one class over the `tokenizers` library.

Knows where a checkpoint keeps its tokenizer; imports no torch itself (Hugging Face directories load transformers).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .checkpoint import resolve
from .spec import ModelError
from .token_bound import TokenBound, token_bound

_SENTENCEPIECE_SPACE = "▁"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with what a job needs around it: end tokens, special token texts, chat template."""

    backend: tokenizers.Tokenizer
    size: int  # ids 0..size-1 are legal
    eos_ids: frozenset[int]
    special_tokens: Mapping[str, str]  # bos_token, eos_token, pad_token, ... as chat templates name them
    chat_template: str | None

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of every text, in parallel. With `add_special_tokens` the tokenizer puts its BOS and the like around."""
        batch = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer: special tokens left out, spaces as they are."""
        return str(self.backend.decode(tokens, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """What one token adds to a text, special or not; half a character shows as U+FFFD."""
        piece = self.backend.id_to_token(token) or ""
        if piece.startswith(_SENTENCEPIECE_SPACE):  # decoded alone, it would lose its space
            return piece.replace(_SENTENCEPIECE_SPACE, " ")
        return str(self.backend.decode([token], skip_special_tokens=False))

    def fewest_tokens(self, text: str) -> int:
        """No fewer tokens than these has a text, told without tokenising it; 0 where nothing is known for sure."""
        return self._bound.fewest(text)

    @cached_property
    def _bound(self) -> TokenBound:
        return token_bound(self.backend.to_str())

    def digest(self) -> str:
        """Identity of everything that decides ids and prompts."""
        around = json.dumps([sorted(self.special_tokens.items()), self.chat_template, sorted(self.eos_ids)])
        return hashlib.sha256(f"{self.backend.to_str()}\0{around}".encode()).hexdigest()


def load_tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, a Hub id or a .gguf file. Raises ModelError with path and cure."""
    place = resolve(path, revision)
    if place.is_dir():
        return _from_directory(place)
    from .weights.gguf_tokenizer import gguf_tokenizer

    return gguf_tokenizer(place)


def _from_directory(directory: Path) -> Tokenizer:
    loaded = _load_with_transformers(directory)
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    special = {name: str(text) for name, text in loaded.special_tokens_map.items() if isinstance(text, str)}
    eos = frozenset() if loaded.eos_token_id is None else frozenset([int(loaded.eos_token_id)])
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(backend, size, eos, special, default_template(loaded.chat_template))


def _load_with_transformers(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model.tokenizer: {directory} has no tokenizer that loads ({reason})") from None
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ModelError(
            f"model.tokenizer: {directory} has no tokenizer.json; convert the tokenizer to the fast format"
        )
    return loaded


def default_template(template: Any) -> str | None:
    """A chat template as text: of several named ones, the `default`."""
    if isinstance(template, Mapping):
        template = template.get("default")
    return None if template is None else str(template)
