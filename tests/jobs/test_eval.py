"""`batchgen eval` on a tiny model: figures, table, refusals."""

import json
from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file, save_file

from batchgen.jobs.cli import invoke


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    return path


def test_native_float32_is_its_own_reference(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", str(model), "--text", str(text), "--dtype", "float32", "--tokens", "200", "--json"]
    assert invoke(command) == 0
    native, *kv, int8, int4, fp8 = json.loads(capsys.readouterr().out)
    assert [record["weights"] for record in (native, int8, int4, fp8)] == ["native", "int8", "int4", "fp8"]
    assert native["tokens"] == 199
    assert native["agreement"] == 1
    assert native["divergence"] == pytest.approx(0, abs=1e-9)
    assert [record["kv_cache"] for record in kv] == ["fp8", "int8", "int4"]
    assert {record["weights"] for record in kv} == {"native"}
    assert 0 < kv[1]["divergence"] < kv[0]["divergence"] < kv[2]["divergence"]
    assert 0 < int8["divergence"] < fp8["divergence"] < int4["divergence"]


def test_texts_are_cut_to_the_context(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tiny.tiny_model("llama3", tmp_path / "short", max_position_embeddings=64)
    command = ["eval", str(short), "--text", str(text), "--weights", "int8", "--kv", "", "--tokens", "200", "--json"]
    assert invoke(command) == 0
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == 200 - 4


def job_file(directory: Path, rows: list[str]) -> Path:
    """A job over these texts; its own model is not there."""
    (directory / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    path = directory / "job.yaml"
    path.write_text(
        "model: {path: ORG/elsewhere}\ninput: {path: rows.jsonl}\nprompt: {text: '{{ text }}', chat: false}\n"
        "generation: {max_tokens: 8}\noutput: {path: out}\n"
    )
    return path


def test_the_first_rows_of_a_job_are_answered_too(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_file(tmp_path, [f"row {number}: the lazy dog" for number in range(40)])
    command = ["eval", str(model), "--text", str(text), "--job", str(job), "--weights", "native,int4", "--kv", "int4"]
    assert invoke([*command, "--dtype", "float32", "--tokens", "99", "--json"]) == 0
    native, kv, int4 = json.loads(capsys.readouterr().out)
    assert native["job_agreement"] == native["agreement"] == 1
    assert 32 <= native["job_answer_tokens"] <= 32 * 24
    assert 0 < int4["job_agreement"] < 1
    assert 0 < kv["job_agreement"] < 1
    assert int4["job_agreement"] != int4["agreement"]
    assert invoke([*command, "--tokens", "99"]) == 0
    heading, table, *lines = capsys.readouterr().out.splitlines()
    assert heading.endswith(f" answer tokens of {job}")
    assert table.endswith("same choice  of the job")
    assert len({len(line) for line in (table, *lines)}) == 1


@pytest.mark.parametrize(
    ("rows", "change", "code", "message"),
    [
        (["too long " * 2000], "", 1, "job.yaml: none of its first rows has an answer to measure on"),
        (["a"], "on: error\n", 2, "job.yaml: on: unknown key"),
    ],
)
def test_a_job_that_cannot_be_asked(
    model: Path,
    text: Path,
    tmp_path: Path,
    rows: list[str],
    change: str,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = job_file(tmp_path, rows)
    job.write_text(job.read_text() + change)
    command = ["eval", str(model), "--text", str(text), "--job", str(job), "--weights", "native", "--kv", ""]
    assert invoke(command) == code
    assert message in capsys.readouterr().err


def broken(folder: Path, value: float) -> Path:
    """A model with one weight of this value."""
    tensors = load_file(tiny.tiny_model("llama3", folder) / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"].view(-1)[5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_figure_that_is_no_number_is_null(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(broken(tmp_path / "model", float("nan")))
    assert invoke(["eval", model, "--text", str(text), "--weights", "native", "--kv", "", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[0]["perplexity"] is None


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_rounded_is_refused_by_name(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], value: float, weights: str
) -> None:
    model = str(broken(tmp_path / "model", value))
    assert invoke(["eval", model, "--text", str(text), "--weights", weights, "--kv", ""]) == 1
    assert "model.layers.0.self_attn.q_proj.weight: NaN or infinity" in capsys.readouterr().err


def test_the_plain_kv_format_is_measured_once(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", str(model), "--text", str(text), "--weights", "native", "--kv", "bfloat16", "--json"]
    assert invoke(command) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_table(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        invoke(["eval", str(model), "--text", str(text), "--weights", "int8", "--kv", "fp8,int4", "--tokens", "99"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reference: native weights, float32: perplexity")
    assert [line.split()[:3] for line in lines[2:]] == [
        ["int8", "bfloat16", "bfloat16"],
        ["native", "fp8", "bfloat16"],
        ["native", "int4", "bfloat16"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "int3"], "--weights: knows native, int8, int4, fp8, got 'int3'"),
        (["--kv", "fp4"], "--kv: knows float32, bfloat16, fp8, int8, int4, got 'fp4'"),
        (["--weights", "", "--kv", ""], "--weights: names no format"),
        (["--text", "nowhere.txt"], "nowhere.txt: not a readable UTF-8 text"),
    ],
)
def test_refusals(
    model: Path, text: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["eval", str(model), "--text", str(text), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_text_is_an_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert invoke(["eval", str(model), "--text", str(tmp_path / "empty.txt")]) == 1
    assert "longer" in capsys.readouterr().err
