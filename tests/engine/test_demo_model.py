"""The small model that `make` fetches: its ids, its logits and its text against transformers' reading of the file."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from demo_model import ROOT, demo_model_path, demo_reference
from forward import load, prompt_logits
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.tokenizer import Tokenizer, load_tokenizer
from batchgen.engine.weights.gguf_file import open_gguf_file

DATA = ROOT / "examples" / "annotate-docs"
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhat does numpy.zeros(3) return?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model_path()


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(str(path))


@functools.cache
def reference_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    own = [
        "",
        "  12345  67",
        "日本語 ไทย é ½ ²",
        "👩\u200d👩\u200d👧\u200d👦",
        "<|im_start|>hi<|im_end|>",
        "\t\n x\r\n",
    ]
    return own + [text for file in sorted(DATA.rglob("*.parquet")) for text in _strings(file)]


def _strings(file: Path) -> Iterator[str]:
    for column in pq.read_table(file).to_pydict().values():
        yield from (value for value in column if isinstance(value, str))


def test_ids_equal_transformers_once_digits_are_split(path: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    """transformers ignores `pre` = smollm and splits as GPT-2 does, which differs where spaces precede a number."""
    assert len(texts) > 100
    reference = reference_tokenizer(path)
    plain = reference(texts, add_special_tokens=True).input_ids
    own = tokenizer.encode(texts, True)
    differing = [text for text, ours, theirs in zip(texts, own, plain, strict=True) if ours != theirs]
    assert differing
    assert all(any(map(str.isnumeric, text)) for text in differing)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), gpt2]
    )
    assert own == reference(texts, add_special_tokens=True).input_ids


def test_what_surrounds_it(path: Path, tokenizer: Tokenizer) -> None:
    checkpoint = open_checkpoint(str(path))
    assert tokenizer.size == 49_152
    assert tokenizer.eos_ids | checkpoint.eos_ids == {2}
    assert tokenizer.encode(["hi"], True) == tokenizer.encode(["hi"], False)
    assert tokenizer.chat_template == reference_tokenizer(path).chat_template
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }


def test_the_file_is_what_the_readme_says(path: Path) -> None:
    tensors = open_gguf_file(path).tensors
    kinds = [tensor.kind.name for tensor in tensors.values()]
    assert len(tensors) == 272
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}


def test_logits_equal_transformers(path: Path, tokenizer: Tokenizer) -> None:
    model = demo_reference()
    prompts = tokenizer.encode(PROMPTS, True)
    for own, prompt in zip(prompt_logits(load(path), prompts, block_size=16), prompts, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-3)
        best, second = expected.topk(2, dim=-1).values.unbind(-1)
        clear = best - second > 1e-3
        assert torch.equal(own.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_it_knows_a_capital(path: Path, tokenizer: Tokenizer) -> None:
    prompts = tokenizer.encode(PROMPTS[:1], True)
    for dtype in (torch.float32, torch.bfloat16):
        (logits,) = prompt_logits(load(path, dtype), prompts, block_size=16)
        assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
