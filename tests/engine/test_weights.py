"""Opening checkpoints: every layout on disk gives the same model, and nothing missing, extra or misshapen passes."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forward import load, prompt_logits
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, random_prompt, tiny_model

from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.spec import ModelError
from batchgen.engine.weights.pickled import PickledReader
from batchgen.engine.weights.safetensors import SafetensorsReader

PROMPT = random_prompt(12, 3)
Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def shard(folder: Path, suffix: str, save: Callable[[Tensors, Path], Any]) -> None:
    """Splits the weights over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = sorted(tensors)
    weight_map = {name: f"{stem}-0000{1 + index % 2}-of-00002.{suffix}" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save({name: tensors[name].clone() for name in names if weight_map[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama3", tmp_path / "model")


def logits(folder: Path) -> torch.Tensor:
    return prompt_logits(load(folder), [PROMPT])[0]


def to_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    "layout",
    [
        lambda folder: shard(folder, "safetensors", save_file),
        lambda folder: shard(folder, "bin", torch.save),
        to_pickle,
    ],
    ids=["safetensors shards", "pickled shards", "one pickled file"],
)
def test_every_layout_is_the_same_model(folder: Path, layout: Callable[[Path], None]) -> None:
    expected = logits(folder)
    layout(folder)
    assert torch.equal(logits(folder), expected)


def test_a_pickle_with_code_in_it_never_runs(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*cannot be read safely"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_bfloat16_weights_are_read_as_they_are(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({name: value.bfloat16() for name, value in tensors.items()}))
    rounded = logits(folder)
    edit(folder, lambda tensors: tensors.update({name: value.float() for name, value in tensors.items()}))
    assert torch.equal(rounded, logits(folder))


def names_of(family: str, tmp_path: Path) -> list[str]:
    return sorted(load_file(tiny_model(family, tmp_path / "names") / "model.safetensors"))


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_any_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    for name in names_of(family, tmp_path):
        folder = tiny_model(family, tmp_path / "model")
        edit(folder, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(ModelError, match=f"1 tensors missing from the checkpoint: {name}$"):
            load(folder)


def test_many_missing_tensors_are_listed_up_to_five(folder: Path) -> None:
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(ModelError, match=r"^9 tensors missing.* and 4 more$"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.bias", "mtp.x"]
)
def test_an_unexpected_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(ModelError, match=f"in the checkpoint but not in this model: {name}"):
        load(folder)


def test_a_biased_qwen3_without_the_flag_is_refused(tmp_path: Path) -> None:
    folder = tiny_model("qwen3", tmp_path / "model", attention_bias=True)
    edit_config(folder, attention_bias=False)
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[63\], not \[64\]"):
        load(folder)


def test_a_wrong_vocabulary_size_is_refused(folder: Path) -> None:
    edit_config(folder, vocab_size=299)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight is \[300, 64\], not \[299, 64\]"):
        load(folder)


def test_old_rotary_buffers_are_skipped(folder: Path) -> None:
    expected = logits(folder)
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(folder), expected)


def test_tied_without_a_head(tmp_path: Path) -> None:
    folder = tiny_model("smollm2", tmp_path / "model")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    decoder = load(folder)
    assert decoder._embedding.rows == decoder._head.linear.rows


def test_tied_with_an_equal_head_keeps_one(tmp_path: Path) -> None:
    folder = tiny_model("smollm2", tmp_path / "model")
    expected = logits(folder)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    decoder = load(folder)
    assert decoder._embedding.rows == decoder._head.linear.rows
    assert torch.equal(logits(folder), expected)


def test_tied_with_another_head_keeps_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model("smollm2", tmp_path / "model")
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": -tensors["model.embed_tokens.weight"]}))
    with caplog.at_level(logging.WARNING):
        decoder = load(folder)
    assert torch.equal(
        decoder._head.linear.rows(torch.arange(VOCABULARY)), -decoder._embedding.rows(torch.arange(VOCABULARY))
    )
    assert "both are used" in caplog.text


def test_quantised_number_types_are_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has the number type I8"):
        load(folder)


def test_a_quantize_config_file_counts(folder: Path) -> None:
    (folder / "quantize_config.json").write_text('{"quant_method": "gptq", "bits": 4}')
    with pytest.raises(ModelError, match="'gptq'"):
        load(folder)


@pytest.mark.parametrize("cut", [4, 200, -100])
def test_a_damaged_file_is_named(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder, "safetensors", save_file)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has none of model\.safetensors"):
        load(folder)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for path, named in [
        (str(tmp_path / "nowhere"), "does not exist"),
        ("nowhere.gguf", "does not exist"),
        (str(tmp_path), r"no config\.json"),
        (__file__, r"no \.gguf"),
    ]:
        with pytest.raises(ModelError, match=named):
            open_checkpoint(path)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"some/model .*no connection.*local directory") as caught:
        open_checkpoint("some/model")
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_had_in_two_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config and tokenizer alone come first; weights only when they are asked for."""
    import huggingface_hub

    asked: list[list[str]] = []

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("some/model", "v2")
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = open_checkpoint("some/model", "v2")
    assert not any("safetensors" in pattern for pattern in asked[0])
    assert "model.norm.weight" in checkpoint.reader.shapes()
    assert any("safetensors" in pattern for pattern in asked[1])


def test_end_tokens_are_a_union(folder: Path) -> None:
    edit_config(folder, eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.5}')
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.eos_ids == {2, 5, 7}
    assert checkpoint.generation_config["temperature"] == 0.5


def test_generation_settings_in_an_old_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_config(folder, top_p=0.5, eos_token_id=None)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.generation_config == {"top_p": 0.5}
    assert checkpoint.eos_ids == frozenset()


@pytest.mark.parametrize(("fields", "expected"), [({"dtype": "bfloat16"}, "bfloat16"), ({"dtype": None}, None)])
def test_number_type_of_the_checkpoint(folder: Path, fields: dict[str, Any], expected: str | None) -> None:
    edit_config(folder, **fields)
    assert open_checkpoint(str(folder)).dtype == expected
    edit_config(folder, dtype=None, torch_dtype="torch.float16")
    assert open_checkpoint(str(folder)).dtype == "float16"


def test_digest_sees_weights_not_only_names(folder: Path) -> None:
    before = open_checkpoint(str(folder)).digest()
    assert open_checkpoint(str(folder)).digest() == before
    edit(folder, lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert open_checkpoint(str(folder)).digest() != before


DAMAGES: dict[str, dict[str, Any]] = {
    "fewer bytes than the shape": {"shape": [65]},
    "a shape of fractions": {"shape": [64.0]},
    "a negative size": {"shape": [-64]},
    "a shape that is none": {"shape": "64"},
    "bytes of the header": {"data_offsets": [-256, 0]},
    "an end before the beginning": {"data_offsets": [256, 0]},
    "a fraction of a byte": {"data_offsets": [0, 256.0]},
    "a type that is no text": {"dtype": 5},
    "a tensor that is none": [],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_of_a_header_is_refused(folder: Path, damage: Any) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"] = {**header["model.norm.weight"], **damage} if damage else damage
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ModelError, match=r"model\.safetensors: .* download it again$"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_refused(folder: Path, content: str) -> None:
    shard(folder, "safetensors", save_file)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json: .* download the model again$"):
        load(folder)


def test_digest_sees_every_tensor(tmp_path: Path) -> None:
    """Each is small between the samples that are spread over a file."""
    values = {f"tensor{at}": torch.full((5000,), float(at)) for at in range(150)}
    for name, write, reader in [
        ("model.safetensors", save_file, SafetensorsReader),
        ("pytorch_model.bin", torch.save, PickledReader),
    ]:
        digests = set()
        for changed in [None, *range(0, 150, 7)]:
            path = tmp_path / name
            write({**values, f"tensor{changed}": torch.ones(5000)} if changed is not None else values, path)
            digests.add(reader([path]).digest())
        assert len(digests) == 23


def test_digest_of_the_oldest_pickles(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    before = PickledReader([path]).digest()
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert PickledReader([path]).digest() != before
