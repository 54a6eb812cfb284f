"""Prompts tokenise to the ids that transformers' apply_chat_template gives, with a real tokenizer and its template."""

from pathlib import Path

import pytest
from stand_ins import row_batch
from tiny import BOS, tiny_tokenizer
from transformers import AutoTokenizer

from batchgen.engine.request import Sampling
from batchgen.engine.tokenizer import load_tokenizer
from batchgen.pipeline.config import PromptSettings
from batchgen.pipeline.prompt import Renderer

CHATS = [
    [{"role": "user", "content": "Say hello"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "  spaces, <|end|> and é  "}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three\n"},
    ],
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(path)
    return path


def test_ids_equal_apply_chat_template(directory: Path) -> None:
    renderer = Renderer(
        PromptSettings(messages_column="chat"), Sampling(), {}, load_tokenizer(str(directory)), 10_000, "2026-01-01"
    )
    reference = AutoTokenizer.from_pretrained(directory)
    outcomes = renderer.render(row_batch(chat=CHATS))
    for outcome, chat in zip(outcomes, CHATS, strict=True):
        expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(outcome.prompt) == expected  # type: ignore[union-attr]
        assert expected.count(BOS) == 1


def test_raw_text_has_what_the_tokenizer_adds(directory: Path) -> None:
    settings = PromptSettings(text="{{ x }}", chat=False, on_too_long="truncate_left")
    renderer = Renderer(settings, Sampling(max_tokens=4), {}, load_tokenizer(str(directory)), 20, "2026-01-01")
    reference = AutoTokenizer.from_pretrained(directory)
    short, long = renderer.render(row_batch(x=["Say hello", "word " * 50]))
    assert list(short.prompt) == reference.encode("Say hello")  # type: ignore[union-attr]
    full = reference.encode("word " * 50)
    front = 1 if full[0] == BOS else 0
    assert list(long.prompt) == full[:front] + full[front - 16 :]  # type: ignore[union-attr]
