"""The cost model: kinds of work lead to different settings, each for its reason; and what it must get right of any."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.costs import Settings, StepCost, Workload, affordable_seconds, predict
from batchgen.engine.grammar import Grammar
from batchgen.engine.options import DEFAULT, SEQUENCES, STEP_TOKENS, Asked, Chosen, choose_settings
from batchgen.engine.processor import Place
from batchgen.engine.profile import NOTHING, workload_of
from batchgen.engine.rates import REFERENCE, Curve, Rates, built_in
from batchgen.engine.rates_cache import entry_name, keep_rates, load_attempt, load_rates
from batchgen.engine.request import Request, Sampling
from batchgen.engine.spec import ModelSpec, RopeSpec

SPEC = ModelSpec(
    "llama", 49152, 8192, 576, 1536, 30, 9, 3, 64, 1e-5, RopeSpec("default", 1e5, 64, 8192), (None,) * 30, tied=True
)
RATES = built_in(SPEC, "bfloat16")
FORMATS = {"weights": ("native", "int8", "int4"), "kv_cache": ("bfloat16", "int8", "int4")}
MEMORY = 256 * 2**20  # room for 11,650 tokens in bfloat16

SHORT_CLASSIFICATION = Workload(5000, own=60, common=30, computed=60, answer=2, longest=100)
LONG_PREFIX = Workload(5000, own=60, common=1800, computed=61, answer=32, longest=1900)
LONG_DOCUMENT = Workload(2000, own=4000, common=30, computed=4000, answer=16, longest=4100)
LONG_ANSWER = Workload(2000, own=20, common=10, computed=20, answer=512, longest=600)
EXTRACTION = Workload(2000, own=300, common=350, computed=310, answer=150, longest=900, forced=0.4)
EIGHT_SAMPLES = Workload(500, own=120, common=0, computed=120, answer=350, longest=500, samples=8)


def chosen(work: Workload, memory: float = MEMORY, **settled: object) -> Chosen:
    return choose_settings(work, RATES, Asked(settled, memory, FORMATS))


def seconds(found: Chosen, name: str) -> dict[object, float]:
    """Predicted, by the values of a setting."""
    choice = next(choice for choice in found.choices if choice.name == name)
    return {value: prediction.seconds for value, prediction in choice.alternatives}


def test_short_classification_needs_large_steps_few_answers_and_no_drafts() -> None:
    """Prompts are the work: steps must be large; an answer is gone after a step or two."""
    found = chosen(SHORT_CLASSIFICATION).settings
    assert found.max_batch_tokens >= 512 >= chosen(LONG_ANSWER, memory=4 * 2**30).settings.max_batch_tokens
    assert (found.speculation, found.sharing) == (False, False)
    assert found.max_sequences < chosen(LONG_ANSWER, memory=4 * 2**30).settings.max_sequences
    assert found.kv_cache == "bfloat16"


def test_a_long_prefix_is_read_once_for_all_rows_that_share_it() -> None:
    found = chosen(LONG_PREFIX)
    assert found.settings.sharing
    assert seconds(found, "sharing")[False] > 1.2 * seconds(found, "sharing")[True]
    assert found.settings.kv_cache == "int8"  # whose codes are multiplied as they lie


def test_long_documents_with_short_answers_are_all_prompt() -> None:
    """The number of answers at once does not move the time by a percent; weights and formats of keys do."""
    found = chosen(LONG_DOCUMENT)
    times = seconds(found, "max_sequences").values()
    assert max(times) < 1.01 * min(times)
    assert found.settings.max_sequences == min(SEQUENCES)
    assert found.settings.kv_cache == "int8"
    assert not found.settings.sharing
    assert seconds(found, "weights")["native"] > 1.1 * seconds(found, "weights")["int8"]


def test_long_answers_want_many_at_once_and_narrow_keys_the_more_the_shorter_memory_is() -> None:
    """256 MiB hold some twenty rows in bfloat16: steps stay far below what the processor could do."""
    short, wide = chosen(LONG_ANSWER), chosen(LONG_ANSWER, memory=4 * 2**30)
    assert short.settings.kv_cache in ("int8", "int4")
    assert seconds(short, "kv_cache")["bfloat16"] > 1.05 * seconds(short, "kv_cache")["int8"]
    gains = [seconds(one, "kv_cache")["bfloat16"] / seconds(one, "kv_cache")["int8"] for one in (short, wide)]
    assert gains[0] > gains[1] > 1
    assert wide.settings.max_sequences >= 128
    assert wide.settings.speculation


def test_extraction_to_json_knows_a_part_of_its_tokens() -> None:
    forced, free = chosen(EXTRACTION), chosen(replace(EXTRACTION, forced=0.0))
    assert forced.predicted.steps < free.predicted.steps
    assert forced.predicted.seconds < free.predicted.seconds
    assert forced.settings.speculation
    assert forced.settings.sharing


def test_many_samples_of_a_prompt_read_it_together() -> None:
    found = chosen(replace(EIGHT_SAMPLES, rows=125, samples=32), memory=4 * 2**30)
    assert found.settings.sharing
    assert not chosen(replace(EIGHT_SAMPLES, samples=2), memory=4 * 2**30).settings.sharing
    assert "samples" in next(choice.reason for choice in found.choices if choice.name == "sharing")
    assert found.settings.max_sequences >= 128
    alone = chosen(replace(EIGHT_SAMPLES, rows=4000, samples=1), memory=4 * 2**30)
    assert not alone.settings.sharing
    assert found.predicted.seconds < alone.predicted.seconds


def test_kinds_of_work_get_settings_of_their_own() -> None:
    kinds = SHORT_CLASSIFICATION, LONG_PREFIX, LONG_DOCUMENT, LONG_ANSWER, EXTRACTION, EIGHT_SAMPLES
    assert len({chosen(kind).settings for kind in kinds}) == len(kinds)


ASKED = {  # prompt tokens that all rows share and that one has alone, and what is asked of it
    "short classification": (30, 60, Sampling(max_tokens=8, grammar=Grammar.choices(["io", "text", "networking"]))),
    "long shared prefix": (1800, 60, Sampling(max_tokens=32, ignore_eos=True)),
    "long document, short answer": (30, 4000, Sampling(max_tokens=16, ignore_eos=True)),
    "short prompt, long answer": (10, 20, Sampling(max_tokens=512, ignore_eos=True)),
    "extraction to JSON": (350, 300, Sampling(max_tokens=300, grammar=Grammar.json_schema({"type": "object"}))),
    "eight samples": (0, 120, Sampling(max_tokens=350, temperature=1.0, n=8, ignore_eos=True)),
}


def asked_rows(common: int, own: int, sampling: Sampling, count: int = 64) -> list[Request]:
    return [
        Request(key, [*range(common), *([5000 + key] * min(1, own)), *range(6000, 6000 + own - 1)], sampling)
        for key in range(count)
    ]


def test_the_first_rows_of_each_kind_lead_to_settings_of_its_own() -> None:
    found = {name: chosen(workload_of(asked_rows(*kind), 5000)).settings for name, kind in ASKED.items()}
    assert len(set(found.values())) == len(ASKED), found
    assert not found["short classification"].speculation
    assert found["long shared prefix"].sharing > found["long document, short answer"].sharing
    narrow = {name for name, settings in found.items() if settings.kv_cache != "bfloat16"}
    assert narrow >= {"short prompt, long answer", "long shared prefix", "long document, short answer"}
    assert "short classification" not in narrow
    assert found["long document, short answer"].max_sequences < found["eight samples"].max_sequences


def test_a_larger_step_must_save_more_than_a_tenth_of_what_the_first_row_waits_for_it() -> None:
    label = Workload(256, own=160, common=396, computed=162, answer=32, longest=600)
    found = chosen(label, memory=4 * 2**30)
    step = next(choice for choice in found.choices if choice.name == "max_batch_tokens")
    costs = {value: at.seconds + 0.1 * at.first_row_seconds for value, at in step.alternatives}
    assert step.value == 512 == min(value for value, cost in costs.items() if cost <= 1.01 * min(costs.values()))
    assert dict(step.alternatives)[1024].seconds < dict(step.alternatives)[512].seconds  # the wait decides
    many = chosen(replace(label, rows=25_600), memory=4 * 2**30)
    assert many.settings.max_batch_tokens > 512  # the first row waits no longer than that of a short job


def test_a_slower_processor_takes_longer_and_chooses_alike() -> None:
    """Its speed is measured beside whatever else runs, so that choices must not hang on it."""
    asked = Asked({}, MEMORY, FORMATS)
    slow = choose_settings(LONG_ANSWER, built_in(SPEC, "bfloat16", "cpu", REFERENCE / 10), asked)
    assert slow.settings == chosen(LONG_ANSWER).settings
    assert slow.predicted.seconds == pytest.approx(10 * chosen(LONG_ANSWER).predicted.seconds)


def test_what_the_job_says_is_taken_and_told() -> None:
    found = chosen(LONG_ANSWER, max_batch_tokens=333, weights="native", speculation=False, sharing=False)
    assert (found.settings.max_batch_tokens, found.settings.weights) == (333, "native")
    assert not found.settings.speculation
    told = {choice.name: choice.reason for choice in found.choices}
    assert told["max_batch_tokens"] == told["weights"] == told["speculation"] == "as the job says"
    assert found.to_record()["choices"][0]["alternatives"][0]["seconds"] > 0


WORK = st.builds(
    Workload,
    rows=st.integers(1, 100_000),
    own=st.floats(0, 3000),
    common=st.floats(0, 3000),
    computed=st.floats(1, 3000),
    answer=st.floats(1, 600),
    longest=st.just(4000),
    samples=st.integers(1, 8),
    forced=st.floats(0, 0.9),
    scored=st.booleans(),
)
SETTINGS = st.builds(
    Settings,
    weights=st.sampled_from(["native", "int4"]),
    kv_cache=st.sampled_from(["bfloat16", "int8"]),
    block_size=st.just(16),
    max_batch_tokens=st.sampled_from(STEP_TOKENS),
    max_sequences=st.sampled_from(SEQUENCES),
    sharing=st.booleans(),
    speculation=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(WORK, SETTINGS, st.floats(1, 1e7))
def test_a_prediction_accounts_for_all_work(work: Workload, under: Settings, room: float) -> None:
    found = predict(work, under, RATES, room)
    assert found.first_row_seconds > 0
    assert found.seconds > 0
    assert found.step_tokens <= 1.05 * (under.max_batch_tokens * (1 + under.speculation * 2) + under.max_sequences)
    least = work.rows * work.computed * RATES.layers[under.weights].seconds[-1] / RATES.layers[under.weights].counts[-1]
    assert found.seconds > 0.9 * least


@settings(deadline=None, max_examples=30)
@given(WORK, SETTINGS)
def test_twice_the_rows_take_more_time(work: Workload, under: Settings) -> None:
    once, twice = predict(work, under, RATES), predict(replace(work, rows=2 * work.rows), under, RATES)
    assert once.seconds < twice.seconds < 2.2 * once.seconds + 1


def test_answers_of_known_length_that_begin_together_are_held_whole_at_once() -> None:
    work = Workload(64, own=5, common=15, computed=5, answer=256, longest=280, certain=True)
    assert predict(work, DEFAULT, RATES).kv_tokens == pytest.approx(64 * (5 + 256) + 15, rel=0.02)
    assert predict(work, DEFAULT, RATES, 1000).kv_tokens == 1000


def test_of_short_answers_behind_long_prompts_few_are_held_at_once() -> None:
    """Steps of 512 tokens let (512 - rows that run) / 160 rows in, and the first of them have ended 32 steps later."""
    work = Workload(4000, own=160, common=0, computed=160, answer=32, longest=192, certain=True)
    rows = 512 * (1 - math.exp(-32 / 160))
    assert predict(work, DEFAULT, RATES).kv_tokens == pytest.approx(rows * (160 + 16), rel=0.1)


def test_a_step_of_nothing_takes_no_time() -> None:
    """Rounding can leave groups of answers that run without anybody in them."""
    cost = StepCost(LONG_ANSWER, replace(DEFAULT, speculation=True), RATES)
    assert cost.drafted(0.0) == (0.0, 1.0)
    assert cost.seconds(0.0, 0.0) == 0.0


def test_a_curve_is_straight_between_its_points_and_in_proportion_behind_them() -> None:
    curve = Curve((1, 10, 100), (1.0, 2.0, 11.0))
    assert [curve.at(count) for count in (0, 1, 5.5, 10, 55, 100, 200)] == [1.0, 1.0, 1.5, 2.0, 6.5, 11.0, 22.0]


def test_micro_runs_take_a_fiftieth_of_a_job_and_a_minute_at_most() -> None:
    hours = replace(LONG_DOCUMENT, rows=10**7)
    assert affordable_seconds(hours, RATES) == 60
    assert affordable_seconds(replace(LONG_DOCUMENT, rows=1), RATES) < 0.5


NO_SECONDS = 0, -1e-3, math.nan, math.inf, "1", None, [], {}
NO_COSTS = [value for value in NO_SECONDS if value != 0]


def spoiled() -> list[tuple[tuple[str, ...], object]]:
    """Places in the record of an entry, and what is not to be there."""
    spoils = [((key,), {}) for key in ("layers", "head", "own_pair", "shared_pair", "kv_bytes", "sharing")]
    spoils += [(("step",), value) for value in NO_COSTS] + [(("basis",), 7)]
    spoils += [((key, "int8"), value) for key in ("own_pair", "kv_bytes") for value in NO_SECONDS]
    spoils += [(("sharing", "int8", "read"), value) for value in NO_COSTS]
    spoils += [(("layers", "int8", "seconds"), value) for value in ([], [1.0], [1.0] * 7 + [0.5], [math.nan] * 8)]
    return [*spoils, (("head", "int8", "counts"), [1] * 8)]


@pytest.mark.parametrize(("place", "value"), spoiled())
def test_an_entry_that_no_measurement_gives_is_none(tmp_path, place: tuple[str, ...], value: object) -> None:
    path, entry = tmp_path / "calibration.json", json.loads(json.dumps(RATES.to_record()))
    inside = entry
    for key in place[:-1]:
        inside = inside[key]
    path.write_text(json.dumps({"whole": entry}))
    assert load_rates(path, "whole") == RATES
    inside[place[-1]] = value
    path.write_text(json.dumps({"spoiled": entry}))
    assert load_rates(path, "spoiled") is None


def test_a_file_of_nothing_but_brackets_holds_no_entry(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("[" * 100_000)
    assert load_rates(path, "any") is None


HERE = Place("cpu", "a processor")


def test_rates_are_kept_by_device_shape_and_versions(tmp_path) -> None:
    path, name = tmp_path / "a" / "calibration.json", entry_name(SPEC, "bfloat16", HERE)
    assert load_rates(path, name) is None
    keep_rates(path, name, RATES)
    keep_rates(path, "other", replace(RATES, basis="measured"))
    assert load_rates(path, name) == RATES
    assert load_rates(path, "other").basis == "measured"
    others = [
        entry_name(replace(SPEC, num_layers=2), "bfloat16", HERE),
        entry_name(SPEC, "float32", HERE),
        entry_name(SPEC, "bfloat16", Place("cuda", "a processor")),
        entry_name(SPEC, "bfloat16", Place("cpu", "another")),
    ]
    assert len({name, *others}) == 5
    for other in ("[1]", "null", "3", '{"' + name + '": 5}', "{"):
        path.write_text(other, encoding="utf-8")
        assert load_rates(path, name) is None
        assert load_attempt(path, name) == 0
        keep_rates(path, "other", RATES)
        assert load_rates(path, "other") == RATES


def requests(prompts: list[list[int]], **sampling: object) -> list[Request]:
    return [Request(key, prompt, Sampling(**sampling)) for key, prompt in enumerate(prompts)]


def test_first_rows_tell_what_the_job_is() -> None:
    instruction = list(range(100))
    rows = requests([[*instruction, 1000 + key, 7] for key in range(4)], max_tokens=10, ignore_eos=True)
    work = workload_of(rows, 1000)
    assert (work.common, work.own, work.answer, work.rows) == (100, 2, 10, 1000)
    assert work.computed == pytest.approx(2.1)  # the instruction once for all thousand
    assert workload_of([], 5) == NOTHING


def test_pairs_that_share_count_what_they_share_once_for_each_pair() -> None:
    rows = requests([[pair, 1, 2, 3, 50 + key] for pair in range(5) for key in range(2)])
    work = workload_of(rows, 10)
    assert (work.common, work.own, work.computed) == (4, 1, 3)


@pytest.mark.parametrize(
    ("sampling", "answer", "samples", "forced"),
    [
        ({"max_tokens": 100}, 50, 1, 0),
        ({"max_tokens": 100, "n": 4}, 50, 4, 0),
        ({"max_tokens": 100, "n": 4, "temperature": 0}, 50, 1, 0),  # equal answers are computed once
        ({"max_tokens": 100, "grammar": Grammar.choices(["seven c", "seven d"])}, 2, 1, 0.3),
        ({"max_tokens": 100, "grammar": Grammar.json_schema({"type": "object"})}, 50, 1, 0.4),
        ({"max_tokens": 100, "grammar": Grammar.json_schema({"type": "object"}), "logprobs": 1}, 50, 1, 0),
    ],
)
def test_parameters_tell_how_long_answers_get(sampling, answer, samples, forced) -> None:
    work = workload_of(requests([[1, 2], [3]], **sampling), 2)
    assert (work.answer, work.samples, work.forced) == (answer, samples, forced)


def test_rates_survive_their_record() -> None:
    assert Rates.from_record(RATES.to_record()) == RATES


def test_a_graphics_card_wants_larger_steps_and_narrow_keys() -> None:
    """8B on an H200: far past the ridge keys are what is read, and FP8 halves both."""
    spec = replace(
        SPEC, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, windows=(None,) * 32,
    )  # fmt: skip
    rates = built_in(spec, "bfloat16", "cuda")
    work = Workload(20_000, own=900, common=100, computed=901, answer=128, longest=1200)
    formats = {"weights": ("native", "int8", "int4", "fp8"), "kv_cache": ("bfloat16", "fp8")}
    found = choose_settings(work, rates, Asked({}, 100 * 2**30, formats)).settings
    assert (found.weights, found.kv_cache) == ("fp8", "fp8")
    assert found.max_batch_tokens >= 1024
    assert found.max_sequences >= 256
