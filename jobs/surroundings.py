"""What in a model's files decides prompts and answers beside the weights: config and tokenizer, as digests.

Knows file names and layouts; loads no tokenizer.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.engine.checkpoint import resolve
from batchgen.engine.weights.gguf_file import open_gguf_file

_TOKENIZER = (
    "tokenizer*", "*token*.json", "chat_template*", "additional_chat_templates/*", "vocab*", "merges*", "*.model",
)  # fmt: skip
_CHANCE = {"transformers_version", "_name_or_path"}  # whoever saved the config last


def config_digest(config: Mapping[str, Any]) -> str:
    """Identity of a config, by its values."""
    return _digest({name: value for name, value in config.items() if name not in _CHANCE})


def tokenizer_digest(path: str, revision: str | None = None) -> str:
    """Identity of a tokenizer and its chat template, by the bytes they are stored as. Raises ModelError."""
    place = resolve(path, revision)
    if place.is_file():
        keys = open_gguf_file(place).keys
        return _digest({name: value for name, value in keys.items() if name.startswith("tokenizer.")})
    files = sorted({file for pattern in _TOKENIZER for file in place.glob(pattern) if file.is_file()})
    return _digest({str(file.relative_to(place)): _digest_of_file(file) for file in files})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
