"""Stand-ins for tokenizer and engine that need no model: bytes as tokens, answers that repeat the prompt's end."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchgen.engine.request import Completion, Request, Sample, Usage
from batchgen.pipeline.rows import RowBatch

BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class ByteTokenizer:
    """One token per byte, <s> and </s> as special tokens; refuses texts that hold `poison`, as a broken one would."""

    chat_template: str | None = None
    adds_bos: bool = True
    poison: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=lambda: {"bos_token": "<s>", "eos_token": "</s>"})
    calls: list[int] = field(default_factory=list)

    def fewest_tokens(self, text: str) -> int:
        return 0

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self.calls.append(len(texts))
        if self.poison is not None and any(self.poison in text for text in texts):
            raise RuntimeError("cannot tokenise this")
        front = [BOS] if add_special_tokens and self.adds_bos else []
        return [front + _ids(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        return {BOS: "<s>", EOS: "</s>"}.get(token) or bytes([token]).decode("utf-8", "replace")


def _ids(text: str) -> list[int]:
    parts = text.split("<s>")
    tokens = list(parts[0].encode())
    for part in parts[1:]:
        tokens += [BOS, *part.encode()]
    return tokens


@dataclass
class EchoEngine:
    """Answers with the last bytes of the prompt, then the end token. Keeps the keys in the order they came."""

    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    eos_ids: frozenset[int] = frozenset({EOS})
    context_length: int = 10_000
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    length: int = 4
    seen: list[int] = field(default_factory=list)
    interrupted: bool = False

    def interrupt(self) -> None:
        self.interrupted = True

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        for request in requests:
            if self.interrupted:
                return
            self.seen.append(request.key)
            if request.error is not None:
                yield Completion(request.key, (), error=request.error, tag=request.tag)
                continue
            sample = Sample([*request.prompt[-self.length :], EOS], "stop")
            usage = Usage(len(request.prompt), 0, self.length + 1)
            yield Completion(request.key, (sample,) * request.sampling.n, usage, tag=request.tag)


def row_batch(start: int = 0, **columns: Any) -> RowBatch:
    """A batch of rows from Python lists."""
    return RowBatch(start, pa.record_batch(columns))
