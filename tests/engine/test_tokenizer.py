"""Token ids equal transformers' for every kind of tokenizer, except where its reading of a GGUF file is known wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BOS, CHAT_TEMPLATE, EOS, TURN_END, tiny_model, tiny_tokenizer
from tiny_gguf import sentencepiece_keys, write_gguf
from transformers import AutoTokenizer

from batchgen.engine.spec import ModelError
from batchgen.engine.tokenizer import load_tokenizer

TEXTS = [
    "",
    " ",
    "the quick brown fox, then the other",
    "  two  spaces\n\n\tand tabs  ",
    "12345 67 a  12 3.14 ١٢٣ ² ½",
    "I'LL don't we've",
    "日本語のテキスト ไทย é e\u0301 naïve",
    "👩\u200d👩\u200d👧\u200d👦 emoji 🇩🇪",
    "<|user|>hi<|end|>\n<|bos|>there",
    "\u0000\u0007\ufeff\ufffd",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama2", tmp_path_factory.mktemp("tokenizer") / "model")


@pytest.fixture(scope="module")
def gguf_file(folder: Path) -> Path:
    write_gguf(folder, folder.parent / "model.gguf", keys={"tokenizer.ggml.eot_token_id": TURN_END})
    return folder.parent / "model.gguf"


@pytest.mark.parametrize("special", [True, False])
def test_directory_and_gguf_equal_transformers(folder: Path, gguf_file: Path, special: bool) -> None:
    expected = AutoTokenizer.from_pretrained(folder)(TEXTS, add_special_tokens=special).input_ids
    assert load_tokenizer(str(folder)).encode(TEXTS, special) == expected
    assert load_tokenizer(str(gguf_file)).encode(TEXTS, special) == expected


def test_what_surrounds_a_tokenizer(folder: Path, gguf_file: Path) -> None:
    for path, eos in ((folder, {EOS}), (gguf_file, {EOS, TURN_END})):
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.size == 288  # padding of the file's vocabulary is left out
        assert tokenizer.eos_ids == eos
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|eos|>")
        assert tokenizer.chat_template == CHAT_TEMPLATE


def test_decoding_leaves_special_tokens_out_and_spaces_alone(folder: Path, gguf_file: Path) -> None:
    for path in (folder, gguf_file):
        tokenizer = load_tokenizer(str(path))
        (ids,) = tokenizer.encode([" a , b .<|end|> don 't"], True)
        assert ids[0] == BOS
        assert tokenizer.decode(ids) == " a , b . don 't"
        assert tokenizer.token_text(TURN_END) == "<|end|>"
        assert tokenizer.token_text(tokenizer.encode([" the"], False)[0][0]) == " the"


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer_once(folder)
    (ids,) = tokenizer.encode([text], False)
    assert all(0 <= token < tokenizer.size for token in ids)
    assert tokenizer.decode(ids) == text or any(mark in text for mark in ("<|",))


_LOADED: dict[Path, Any] = {}


def load_tokenizer_once(path: Path) -> Any:
    return _LOADED.setdefault(path, load_tokenizer(str(path)) if path not in _LOADED else None)


def test_templates(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path, chat_template=False)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(str(tmp_path)).chat_template is None
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert load_tokenizer(str(tmp_path)).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(str(tmp_path)).chat_template == "J"


def test_digest_sees_template_and_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "llama"}')
    with_template = load_tokenizer(str(tiny_tokenizer(tmp_path / "a"))).digest()
    assert load_tokenizer(str(tiny_tokenizer(tmp_path / "a"))).digest() == with_template
    assert load_tokenizer(str(tiny_tokenizer(tmp_path / "a", chat_template=False))).digest() != with_template


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"model\.tokenizer: .*no tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "drop", "named"),
    [
        ({"tokenizer.ggml.pre": "martian"}, (), "'martian'"),
        ({"tokenizer.ggml.model": "t5"}, (), "'t5'"),
        ({}, ("tokenizer.ggml.model",), r"tokenizer\.ggml\.model"),
        ({}, ("tokenizer.ggml.merges",), r"tokenizer\.ggml\.merges"),
        ({"tokenizer.ggml.model": "llama"}, (), r"tokenizer\.ggml\.scores"),
        ({"tokenizer.ggml.eos_token_id": 5000}, (), r"eos_token_id 5000"),
        ({"tokenizer.ggml.token_type": [1, 2]}, (), "2 token types"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, (), "does not fit together"),
    ],
)
def test_what_a_gguf_tokenizer_is_refused_for(
    folder: Path, tmp_path: Path, keys: dict[str, Any], drop: tuple[str, ...], named: str
) -> None:
    write_gguf(folder, tmp_path / "model.gguf", keys=keys, drop=drop)
    with pytest.raises(ModelError, match=named) as caught:
        load_tokenizer(str(tmp_path / "model.gguf"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_splitting_equals_transformers(folder: Path, tmp_path: Path, pre: str) -> None:
    write_gguf(folder, tmp_path / "model.gguf", keys={"tokenizer.ggml.pre": pre})
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").backend_tokenizer
    own = load_tokenizer(str(tmp_path / "model.gguf")).backend
    for text in TEXTS:
        ours = own.pre_tokenizer.pre_tokenize_str(text)
        assert ours == reference.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a  1234", ["a", "ĠĠ", "1", "2", "3", "4"]),
        ("gpt-2", "a  1234", ["a", "Ġ", "Ġ1234"]),
        ("llama-bpe", "a  1234", ["a", "Ġ", "Ġ", "123", "4"]),
        ("qwen2", "a 12\n", ["a", "Ġ", "1", "2", "Ċ"]),
        ("tekken", "aBCd 12", ["a", "BCd", "Ġ", "1", "2"]),
    ],
)
def test_splitting_by_hand(folder: Path, tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    write_gguf(folder, tmp_path / "model.gguf", keys={"tokenizer.ggml.pre": pre})
    own = load_tokenizer(str(tmp_path / "model.gguf")).backend
    assert [piece for piece, _ in own.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_user_defined_tokens_stay_whole_and_are_shown(folder: Path, tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.token_type": [3, 3, 3, 4, 3, 3] + [1] * 282 + [5, 5]}
    write_gguf(folder, tmp_path / "model.gguf", keys=tokens)
    tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
    (ids,) = tokenizer.encode(["x<|user|>y<|end|>"], False)
    assert ids[1] == 3
    assert tokenizer.decode(ids) == "x<|user|>y"


def test_sentencepiece_equals_transformers(folder: Path, tmp_path: Path) -> None:
    dropped = ("tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
    write_gguf(folder, tmp_path / "model.gguf", keys=sentencepiece_keys(), drop=dropped)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    own = load_tokenizer(str(tmp_path / "model.gguf"))
    texts = ["hi the hi", " the  hithe", "<s>[hi the</s> hi", "日本 é\n", "thehi", ""]
    assert own.encode(texts, True) == reference(texts).input_ids
    assert own.encode(["hi"], True)[0][0] == 1
    for ids in own.encode(texts, False):
        assert own.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    (the,) = own.encode(["the"], False)
    assert own.token_text(the[0]) == " the"
    assert own.token_text(own.backend.token_to_id("▁▁")) == "  "


def test_sentencepiece_without_a_prefix_space(folder: Path, tmp_path: Path) -> None:
    keys = sentencepiece_keys(add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    write_gguf(folder, tmp_path / "model.gguf", keys=keys)
    own = load_tokenizer(str(tmp_path / "model.gguf"))
    (ids,) = own.encode(["hi the"], True)
    assert [own.backend.id_to_token(token) for token in ids] == ["hi", "▁the", "</s>"]
    assert own.decode(ids) == "hi the"


def test_a_gguf_tokenizer_needs_neither_torch_nor_transformers(gguf_file: Path) -> None:
    code = (
        "import sys; from batchgen.engine.tokenizer import load_tokenizer; from batchgen.engine.checkpoint import "
        f"open_checkpoint; load_tokenizer({str(gguf_file)!r}).encode(['hi'], True); open_checkpoint({str(gguf_file)!r})"
        "; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
