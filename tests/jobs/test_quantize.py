"""`batchgen quantize`: its files load here and in transformers, keep their codes, and appear whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from forward import CPU, prompt_logits
from gguf import GGMLQuantizationType as Kind
from quantised import relative
from safetensors.torch import load_file, save_file
from tiny import random_prompt, tiny_model
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchgen import kernels
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.decoder import load_decoder
from batchgen.engine.rewrite import rewrite
from batchgen.engine.spec import ModelError
from batchgen.engine.tokenizer import load_tokenizer
from batchgen.engine.weights.quantise import to_symmetric_int4
from batchgen.jobs.cli import invoke

PROMPT = random_prompt(30, 3)
FORMATS = ["int4", "int8", "fp8"]


def native_logits(path: Path) -> torch.Tensor:
    decoder = load_decoder(open_checkpoint(str(path)), torch.float32, CPU, kernels.load("cpu"), "native")
    return prompt_logits(decoder, [PROMPT])[0]


@torch.no_grad()
def reference_logits(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()(torch.tensor([PROMPT]), use_cache=False).logits[0]


@pytest.mark.parametrize("weights", FORMATS)
def test_transformers_computes_what_is_computed_here(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tiny_model("llama3", tmp_path / "model"), tmp_path / "out"
    assert invoke(["quantize", str(folder), str(out), "--weights", weights]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{out}: ")
    assert f"{weights} with " in line
    assert "error added, relative (RMS): " in line
    own = native_logits(out)
    # of int8 the file says that activations have 8 bits too: transformers rounds them, a scale for each token
    assert relative(own, reference_logits(out)) < (0.1 if weights == "int8" else 1e-5)
    assert 0 < relative(own, native_logits(folder)) < {"int4": 0.7, "int8": 0.1, "fp8": 0.3}[weights]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("weights", FORMATS)
def test_codes_stay_bit_for_bit(weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    rewrite(open_checkpoint(str(folder)), _new(tmp_path / "once"), weights)
    decoder = load_decoder(open_checkpoint(str(tmp_path / "once")), torch.float32, CPU, kernels.load("cpu"), weights)
    assert decoder.rounding.keys() == {"head"}  # nothing else was rounded again
    assert invoke(["quantize", str(tmp_path / "once"), str(tmp_path / "twice"), "--weights", weights]) == 0
    assert "error added, relative (RMS): none, the codes were kept" in capsys.readouterr().out
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[name].view(torch.uint8), twice[name].view(torch.uint8)) for name in once)


def test_a_gguf_file_becomes_a_directory(tmp_path: Path) -> None:
    folder = tiny_model("qwen3", tmp_path / "model")
    write_gguf(folder, tmp_path / "model.gguf", lambda name: Kind.Q8_0)
    out = tmp_path / "out"
    assert invoke(["quantize", str(tmp_path / "model.gguf"), str(out), "--group", "32"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    own = native_logits(out)
    assert relative(own, reference_logits(out)) < 1e-5
    before, after = load_tokenizer(str(tmp_path / "model.gguf")), load_tokenizer(str(out))
    text = "The quick brown fox, 1234."
    assert after.encode([text], True) == before.encode([text], True)
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == before.encode([text], True)[0]
    assert after.chat_template == before.chat_template
    assert (
        open_checkpoint(str(out)).eos_ids | after.eos_ids
        == before.eos_ids | open_checkpoint(str(tmp_path / "model.gguf")).eos_ids
    )


def test_shards_of_a_bounded_size(tmp_path: Path) -> None:
    folder = tiny_model("smollm2", tmp_path / "model")
    whole, parts = _new(tmp_path / "whole"), _new(tmp_path / "parts")
    rewrite(open_checkpoint(str(folder)), whole, "int4")
    done = rewrite(open_checkpoint(str(folder)), parts, "int4", shard_bytes=30_000)
    shards = sorted(parts.glob("model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.num_bytes
    assert {name: path.name for path in shards for name in load_file(path)} == index["weight_map"]
    assert torch.equal(native_logits(parts), native_logits(whole))
    assert relative(native_logits(parts), reference_logits(parts)) < 1e-5


def test_symmetric_int4_is_no_worse_than_the_whole_range() -> None:
    values = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    codes, scale = to_symmetric_int4(values, 64, torch.bfloat16)
    rounded = (codes - 8) * scale.repeat_interleave(64, 1)
    step = (values.view(40, 4, 64).abs().amax(-1) / 7).repeat_interleave(64, 1)
    whole_range = (values / step).round() * step
    assert relative(rounded, values) < 0.95 * relative(whole_range, values)
    assert torch.equal(scale.bfloat16().float(), scale)
    assert codes.min() == 0
    assert codes.max() <= 15


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--weights", "int8", "--group", "64"], 2, "--group: only int4 has groups"),
        (["--group", "48"], 1, "cannot be cut into groups of 48; try another --group"),
        (["--weights", "int3"], 2, "'int3' is not one of"),
    ],
)
def test_refusals(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    assert invoke(["quantize", str(folder), str(tmp_path / "out"), *arguments]) == code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    found = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path, metadata={"format": "pt"})


def test_biases_of_nothing_but_zeros_are_left_out(tmp_path: Path) -> None:
    """As `run` does; some writers add them to every linear."""
    folder, out = tiny_model("llama3", tmp_path / "model"), _new(tmp_path / "out")
    edit(folder, model__layers__0__mlp__down_proj__bias=torch.zeros(64))
    rewrite(open_checkpoint(str(folder)), out, "int8")
    assert "model.layers.0.mlp.down_proj.bias" not in load_file(out / "model.safetensors")
    assert torch.isfinite(native_logits(out)).all()


def test_a_checkpoint_that_cannot_be_run_is_not_rewritten(tmp_path: Path) -> None:
    folder = tiny_model("llama3", tmp_path / "model")
    edit(folder, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"1 tensors missing from the checkpoint: lm_head\.weight"):
        rewrite(open_checkpoint(str(folder)), _new(tmp_path / "out"), "int8")


def test_what_is_there_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tiny_model("llama3", tmp_path / "model"), _new(tmp_path / "out")
    (out / "mine").write_text("x")
    assert invoke(["quantize", str(folder), str(out)]) == 2
    assert f"{out}: is not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine"]
    (out / "mine").unlink()
    assert invoke(["quantize", str(folder), str(out)]) == 0  # an empty directory may be there


def _new(path: Path) -> Path:
    path.mkdir()
    return path
