"""The accuracy gate: a format that changes too much is refused and named, one that does not is taken."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCABULARY, random_prompt, tiny_model
from tiny_gguf import write_gguf

from batchgen import kernels
from batchgen.engine import choose as choose_module
from batchgen.engine import gate
from batchgen.engine.accuracy import Accuracy
from batchgen.engine.checkpoint import open_checkpoint
from batchgen.engine.choose import (
    LONGEST,
    MOST_ROWS,
    MOST_TOKENS,
    _worth,
    choose_formats,
    reference_dtype,
    select_prompts,
    stored_format,
)
from batchgen.engine.decoder import Decoder, load_decoder
from batchgen.engine.gate import KV, WEIGHTS, Choice, Limits, Measured, Question, Texts, choose
from batchgen.engine.spec import ModelError

PROMPTS = [random_prompt(40, seed) for seed in range(6)]
OPS = kernels.load("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


def answer(model: Decoder) -> Texts:
    return Texts(tuple(tuple(prompt) for prompt in PROMPTS), tuple(30 for _ in PROMPTS), VOCABULARY)


def ask(
    folder: Path,
    weights: str,
    trials: Mapping[str, float],
    scales: Mapping[str, float],
    kv: tuple[str, Mapping[str, float]] = ("auto", {}),
) -> Choice:
    """`scales`: a fake format multiplies the head of the native model by so much."""

    def load(name: str) -> Decoder:
        model = load_decoder(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"), OPS, "native")
        model._head.linear._packed.numbers.mul_(scales.get(name, 1.0))
        return model

    return choose(Question(weights, kv[0], trials, kv[1]), load, answer, OPS)


def test_a_format_that_cannot_hold_the_checkpoint_is_skipped_with_a_note(folder: Path) -> None:
    def load(name: str) -> Decoder:
        if name == "small":
            raise ModelError("q_proj.weight: groups of 7 inputs")
        return load_decoder(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"), OPS, "native")

    trials = {"small": 0.3, "good": 0.5}
    choice = choose(Question("auto", "auto", trials, {}), load, answer, OPS)
    assert (choice.weights, choice.note) == ("good", "small not tried: q_proj.weight: groups of 7 inputs")
    with pytest.raises(ModelError, match="groups of 7"):
        choose(Question("small", "auto", {"small": 0.3}, {}), load, answer, OPS)


def test_the_fastest_that_passes_is_taken_and_who_fails_is_named(folder: Path) -> None:
    choice = ask(folder, "auto", {"bad": 0.3, "good": 0.5, "slow": 0.8}, {"bad": 0.5, "good": 1.0001})
    assert choice.weights == "good"
    bad, good = choice.trials  # the slower one is not tried any more
    assert (bad["format"], bad["taken"]) == ("bad", False)
    assert "perplexity" in bad["broken"] or "KL" in bad["broken"]
    assert (good["format"], good["taken"], good["broken"]) == ("good", True, None)
    assert good["tokens"] == 6 * 39
    assert good["answer_tokens"] == 6 * 10
    assert good["same_choice"] == 1


def test_where_none_passes_weights_stay_native(folder: Path) -> None:
    choice = ask(folder, "auto", {"bad": 0.3, "worse": 0.5}, {"bad": 0.5, "worse": -1.0})
    assert choice.weights == "native"
    assert [trial["taken"] for trial in choice.trials] == [False, False]


def test_a_format_that_is_asked_for_is_obeyed_with_its_numbers(folder: Path) -> None:
    choice = ask(folder, "bad", {"bad": 1.7}, {"bad": 0.5})
    assert choice.weights == "bad"
    (trial,) = choice.trials
    assert trial["asked"]
    assert trial["taken"]
    assert trial["broken"] is not None


def test_a_changed_choice_alone_is_enough_to_fail(folder: Path) -> None:
    """Rolling the vocabulary leaves no choice as it was."""
    choice = ask(folder, "auto", {"bad": 0.3}, {"bad": -1.0})
    assert choice.trials[0]["same_choice"] < 0.5


@pytest.mark.parametrize(("asked", "taken"), [("auto", "auto"), ("int4", "int4")])
def test_kv_formats_are_measured_on_the_reference(folder: Path, asked: str, taken: str) -> None:
    """Random weights do not bear 4-bit keys; what the weights' format changes does not count against the keys'."""
    choice = ask(folder, "bad", {"bad": 0.5}, {"bad": 0.5}, (asked, {"int4": 0.5}))
    assert choice.kv_cache == taken
    kv, weights = choice.trials
    assert (kv["kind"], weights["kind"]) == ("kv_cache", "weights")
    assert kv["divergence"] > 0.001
    assert kv["broken"] is not None
    alone = ask(folder, "auto", {}, {}, (asked, {"int4": 0.5}))
    assert alone.trials == (kv,)


def test_kv_formats_take_no_more_texts_than_they_need(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "KV_TOKENS", 90)
    choice = ask(folder, "good", {"good": 0.5}, {"good": 1.0}, ("auto", {"int8": 0.5}))
    assert {trial["format"]: trial["rows"] for trial in choice.trials} == {"good": 6, "int8": 2}


@given(st.integers(1, 5000), st.floats(0, 1))
def test_a_few_changed_answers_more_are_chance(tokens: int, share: float) -> None:
    """A share may lie above its limit by its standard error, up to twice the limit; other limits hold as they stand."""
    changed = int(share * tokens) / tokens
    answers = Accuracy(tokens, 1.0, 1.0, 0.0, 1 - changed)
    broken = WEIGHTS.broken(Measured(answers, answers))
    assert (broken is None) == (1 - answers.agreement <= 0.02 + min(0.02, (0.02 * 0.98 / tokens) ** 0.5))
    assert broken is not None or changed <= 0.04
    assert broken is None or "same choice" in broken
    worse = Accuracy(tokens, 1.0, 1.0 + math.log(1.0101), 0.0, 1.0)
    assert "perplexity" in str(WEIGHTS.broken(Measured(worse, worse)))


@pytest.mark.parametrize(("limits", "most"), [(WEIGHTS, 0.01), (KV, 0.005)], ids=["weights", "kv"])
def test_perplexity_may_rise_by_so_much_and_no_more(limits: Limits, most: float) -> None:
    def broken(rise: float) -> str | None:
        measured = Accuracy(1000, 3.0, 3.0 + math.log1p(rise), 0.0, 1.0)
        return limits.broken(Measured(measured, measured))

    assert [broken(rise) for rise in (-0.5, 0.0, most - 1e-4)] == [None] * 3
    for rise in (most + 1e-4, 0.5, math.inf, math.nan):
        assert str(broken(rise)).endswith(f"limit {most:+.1%}")


def test_nothing_is_loaded_where_there_is_nothing_to_try() -> None:
    def never(*_: object) -> Decoder:
        raise AssertionError("a model was loaded")

    choice = choose(Question("auto", "auto", {}, {}), never, never, OPS)  # type: ignore[arg-type]
    assert choice == Choice("native", "auto")


SHARES: dict[str, dict[str, float]] = {"weights": {"int8": 0.6, "int4": 0.5}, "kv_cache": {}}


def prompts_of(prompts: list[list[int]]) -> Callable[[], list[list[int]]]:
    return lambda: prompts


def test_float32_is_exact(folder: Path) -> None:
    """The checkpoint is in float32, or float32 is asked for: native weights and no measurement."""
    for dtype in ("auto", "float32"):
        choice = choose_formats(str(folder), prompts_of([]), SHARES, dtype=dtype, device="cpu")
        assert choice == Choice("native", "auto")


def test_a_format_is_measured_on_prompts_and_their_answers(folder: Path) -> None:
    choice = choose_formats(str(folder), prompts_of(PROMPTS), SHARES, weights="int4", device="cpu")
    assert choice.weights == "int4"
    (trial,) = choice.trials
    assert trial["rows"] == 6
    assert 6 <= trial["answer_tokens"] <= 6 * 24
    assert trial["divergence"] > 0
    assert trial["time"] > 0


@pytest.mark.parametrize("context", [8, 64])
@pytest.mark.parametrize(("weights", "taken"), [("int4", "int4"), ("auto", "native")])
def test_a_short_context_is_no_obstacle(tmp_path: Path, context: int, weights: str, taken: str) -> None:
    """Prompts that nearly fill it are measured on as far as an answer fits; where none does, that is told."""
    folder = tiny_model("llama3", tmp_path, max_position_embeddings=context)
    prompts = prompts_of([random_prompt(context - 2, seed) for seed in range(3)])
    shares = {"weights": {"int4": 0.5}, "kv_cache": {}}
    choice = choose_formats(str(folder), prompts, shares, weights=weights, dtype="bfloat16", device="cpu")
    if context == 8:
        assert choice == Choice(taken, "auto", note="not measured: none of the first rows has an answer to measure on")
    else:
        assert choice.weights == ("int4" if choice.trials[0]["taken"] else "native")
        assert choice.trials[0]["rows"] == 3


def test_who_keeps_the_codes_comes_first_unless_another_is_5_percent_faster() -> None:
    assert list(_worth({"int8": 0.68, "int4": 0.7, "fp8": 1.0}, "auto", "int4")) == ["int4", "int8"]
    assert list(_worth({"int8": 0.65, "int4": 0.7, "fp8": 1.0}, "auto", "int4")) == ["int8", "int4"]
    assert list(_worth({"int8": 0.6, "int4": 0.7}, "auto")) == ["int8", "int4"]
    assert _worth({"int8": 0.6, "int4": 1.7}, "int4") == {"int4": 1.7}


@pytest.mark.parametrize(("kind", "kept"), [(Kind.Q4_0, "int4"), (Kind.Q8_0, "int8"), (Kind.F16, None)])
def test_the_format_of_a_file_is_told_by_a_linear(kind: Kind, kept: str | None, tmp_path: Path) -> None:
    write_gguf(tiny_model("llama2", tmp_path / "model"), tmp_path / "model.gguf", lambda name: kind)
    assert stored_format(open_checkpoint(str(tmp_path / "model.gguf"))) == kept


def test_prompts_are_selected_by_the_tokens_they_add() -> None:
    prefix = list(range(500))
    chosen = select_prompts([[*prefix, *random_prompt(100, seed)] for seed in range(100)], 4000)
    assert len(chosen) == 1 + (MOST_TOKENS - 600) // 100
    assert len(select_prompts([[1, row] for row in range(100)], 4000)) == MOST_ROWS
    assert [len(prompt) for prompt in select_prompts([[7] * 5000], 4000)] == [LONGEST]
    assert select_prompts([[], [5]], 4000) == [(5,)]


def test_prompts_that_are_cut_keep_their_ends_and_what_they_share() -> None:
    """Cut at the end, rows behind one long prefix were one text, measured as often as there are rows."""
    prefix = random_prompt(LONGEST + 200, 1)
    rows = [[*prefix, *random_prompt(20, seed)] for seed in range(2, 12)]
    assert select_prompts([*rows, *rows], 4000) == [tuple(row[220:]) for row in rows]


def test_a_prompt_that_adds_too_much_is_passed_over() -> None:
    prompts = [random_prompt(size, seed) for seed, size in enumerate((700, 700, 300, 100))]
    assert [len(text) for text in select_prompts(prompts, 4000)] == [700, 700, 100]
    assert [len(text) for text in select_prompts(prompts, 50)] == [50] * 4


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8), st.integers(0, 9))
def test_selected_prompts_are_different_ends(prompts: list[list[int]], longest: int) -> None:
    chosen = select_prompts(prompts, longest)
    assert len(set(chosen)) == len(chosen)
    for text in chosen:
        assert 0 < len(text) <= longest
        assert any(tuple(prompt[-len(text) :]) == text for prompt in prompts)


def test_the_reference_is_float32_where_it_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, cpu = open_checkpoint(str(folder)), torch.device("cpu")
    numbers = sum(math.prod(shape) for shape in checkpoint.reader.shapes().values())
    for room, dtype in ((8, torch.float32), (4, torch.bfloat16), (1, None)):
        monkeypatch.setattr(choose_module, "free_memory", lambda device, room=room: numbers * room)
        assert reference_dtype(checkpoint, torch.bfloat16, cpu) is dtype


def test_a_format_of_16_bits_is_compared_with_float32(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []

    def loaded(checkpoint: object, dtype: torch.dtype, *rest: Any) -> Decoder:
        dtypes.append((dtype, rest[-1]))
        return load_decoder(checkpoint, dtype, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(choose_module, "load_decoder", loaded)
    choose_formats(str(folder), prompts_of(PROMPTS), SHARES, weights="int8", dtype="bfloat16", device="cpu")
    assert dtypes == [(torch.bfloat16, "native"), (torch.float32, "native"), (torch.bfloat16, "int8")]
