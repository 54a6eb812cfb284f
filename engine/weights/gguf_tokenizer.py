"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library alone.

Knows the two kinds of vocabulary (byte-level BPE, SentencePiece-like) and, for the first, how each `pre` splits text
before merging. An unknown kind or `pre` is refused, because a wrong split gives wrong ids without any sign.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from ..spec import ModelError
from ..tokenizer import Tokenizer, default_template
from .gguf_file import open_gguf_file

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_by(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_SPLITS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "llama-bpe": _split_by(_LLAMA3),
    "llama3": _split_by(_LLAMA3),
    "llama-v3": _split_by(_LLAMA3),
    "qwen2": _split_by(_QWEN2),
    "deepseek-r1-qwen": _split_by(_QWEN2),
    "tekken": _split_by(_TEKKEN),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token is not merged up
_BOS_UNLESS_TOLD = ("llama-bpe", "llama3", "llama-v3", "tekken")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is normalised to NFC first


def gguf_tokenizer(path: Path) -> Tokenizer:
    """Raises ModelError naming the key that is missing or not understood."""
    keys = _TokenizerKeys(path)
    backend = _backend(keys)
    _add_tokens(backend, keys)
    special = {name: keys.tokens[keys.get(key)] for name, key in _IDS.items() if keys.get(key) is not None}
    _add_ends(backend, keys, special)
    eos = frozenset(keys.get(key) for key in ("eos_token_id", "eot_token_id") if keys.get(key) is not None)
    return Tokenizer(backend, keys.size, eos, special, keys.chat_template)


class _TokenizerKeys:
    """The `tokenizer.ggml.*` keys of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._keys: Mapping[str, Any] = open_gguf_file(path).keys
        self.tokens: list[str] = self.need("tokens")
        self.types: list[int] = self.get("token_type") or [_NORMAL] * len(self.tokens)
        self.model: str = self.need("model")
        self.pre: str = self.get("pre") or "default"
        self._check()

    def get(self, name: str) -> Any:
        return self._keys.get(f"tokenizer.ggml.{name}")

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"{self.path}: GGUF has no tokenizer.ggml.{name}; give model.tokenizer")
        return value

    @property
    def size(self) -> int:
        """Ids in use: files pad the vocabulary up to the rows of the head with unused tokens."""
        return len(self.tokens) - next(
            (index for index, kind in enumerate(reversed(self.types)) if kind != _UNUSED), len(self.tokens)
        )

    @property
    def chat_template(self) -> str | None:
        return default_template(self._keys.get("tokenizer.chat_template"))

    def _check(self) -> None:
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{self.path}: GGUF has {len(self.tokens)} tokens but {len(self.types)} token types")
        self._known("model", self.model, _BACKENDS)
        if self.model == "gpt2":
            self._known("pre", self.pre, _SPLITS)
        for key in (*_IDS.values(), "eot_token_id"):
            if not 0 <= (self.get(key) or 0) < len(self.tokens):
                raise ModelError(f"{self.path}: GGUF tokenizer.ggml.{key} {self.get(key)} is beyond the vocabulary")

    def _known(self, key: str, value: str, table: Mapping[str, object]) -> None:
        if value not in table:
            known = ", ".join(table)
            raise ModelError(f"{self.path}: GGUF tokenizer.ggml.{key} {value!r} is not supported (there are: {known})")


def _backend(keys: _TokenizerKeys) -> Backend:
    try:
        return _BACKENDS[keys.model](keys)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{keys.path}: the GGUF tokenizer does not fit together ({error})") from None


def _byte_level(keys: _TokenizerKeys) -> Backend:
    vocabulary = {token: index for index, token in enumerate(keys.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in keys.need("merges")]
    backend = Backend(BPE(vocab=vocabulary, merges=merges, ignore_merges=keys.pre in _WHOLE_WORDS_FIRST))
    if keys.pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _SPLITS[keys.pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: _TokenizerKeys) -> Backend:
    """The prefix space goes to the start of the text only, as in transformers' own reading of such files."""
    vocabulary = {token: index for index, token in enumerate(keys.tokens)}
    unknown = next((keys.tokens[index] for index, kind in enumerate(keys.types) if kind == _UNKNOWN), None)
    merges = _merges_by_score(keys, vocabulary)
    backend = Backend(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = keys.get("add_space_prefix") is not False
    scheme = "first" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges_by_score(keys: _TokenizerKeys, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first: what SentencePiece does without listing merges."""
    scores = keys.need("scores")
    merges = []
    for index, token in enumerate(keys.tokens):
        if keys.types[index] in (_NORMAL, _USER_DEFINED):
            halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            pairs = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
            merges += [(-scores[index], vocabulary[left], vocabulary[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(merges)]


_BACKENDS: dict[str, Callable[[_TokenizerKeys], Backend]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _add_tokens(backend: Backend, keys: _TokenizerKeys) -> None:
    """Tokens that are found whole in a text: control tokens (left out when decoding) and user-defined ones."""
    kinds = list(zip(keys.tokens, keys.types, strict=True))
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind in (_CONTROL, _UNKNOWN)]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED])


def _add_ends(backend: Backend, keys: _TokenizerKeys, special: Mapping[str, str]) -> None:
    """What `add_special_tokens` puts around a text: BOS and EOS as the file says."""
    bos = keys.get("add_bos_token")
    if bos is None:
        bos = keys.model == "llama" or keys.pre in _BOS_UNLESS_TOLD
    before = [special["bos_token"]] if bos and "bos_token" in special else []
    after = [special["eos_token"]] if keys.get("add_eos_token") and "eos_token" in special else []
    if before or after:
        ids = [(token, keys.tokens.index(token)) for token in dict.fromkeys([*before, *after])]
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
