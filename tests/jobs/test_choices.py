"""What `auto` comes to in a job: taken from its first rows, told by plan --explain, kept in the manifest."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny
import torch
from fake_models import SPEC, FakeModels
from job_files import make_job, manifest, write_rows

from batchgen.engine import calibration, cgroup, device, processor
from batchgen.engine.config import EngineSettings
from batchgen.engine.costs import Workload
from batchgen.engine.device import Cuda
from batchgen.engine.options import STEP_TOKENS, Chosen
from batchgen.engine.processor import Place
from batchgen.engine.rates import built_in
from batchgen.engine.request import Request
from batchgen.engine.sizing import kv_cache_bytes
from batchgen.jobs import Job, choices, models, run
from batchgen.jobs.choices import Adaptation, Situation, limits_of, measured
from batchgen.jobs.cluster.models import ClusterModels
from batchgen.jobs.command_plan import plan_job
from batchgen.jobs.errors import UsageError
from batchgen.jobs.models import Models

HERE = Place("cpu", "a processor")
HUGE = Workload(10**8, own=1000, common=0, computed=1000, answer=100, longest=1100)


class Keeping(FakeModels):
    """Keeps the engine sections that it was asked to load."""

    def engine(self, job: Job):
        self.loaded = [*getattr(self, "loaded", []), job.engine]
        return super().engine(job)


def test_a_run_takes_the_choices_and_keeps_them_with_what_they_were_chosen_among(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    job, given = make_job(tmp_path, prompt__on_null="empty"), Keeping()
    run(job, models=given)
    kept = manifest(job.output_path)["choices"]
    (engine,) = given.loaded
    assert (engine.max_batch_tokens, engine.max_sequences) == (
        kept["settings"]["max_batch_tokens"],
        kept["settings"]["max_sequences"],
    )
    assert manifest(job.output_path)["settings"]["engine"]["max_batch_tokens"] == "auto"
    assert kept["basis"] == "built in rates"
    assert kept["predicted"]["step_ms"] > 0
    names = [choice["name"] for choice in kept["choices"]]
    assert names[:4] == ["weights", "kv_cache", "max_batch_tokens", "max_sequences"]
    steps = next(choice for choice in kept["choices"] if choice["name"] == "max_batch_tokens")
    assert [one["value"] for one in steps["alternatives"]] == list(STEP_TOKENS)
    assert kept["measured"] == {}  # an engine that counts no steps


def test_what_the_job_names_is_not_chosen(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    job = make_job(
        tmp_path,
        prompt__on_null="empty",
        engine__max_batch_tokens=77,
        engine__max_sequences=9,
        engine__speculation="ngram",
    )
    given = Keeping()
    run(job, models=given)
    (engine,) = given.loaded
    assert (engine.max_batch_tokens, engine.max_sequences, engine.speculation) == (77, 9, "ngram")


def test_measured_figures_are_those_of_the_steps() -> None:
    assert measured(2.0, 100, 5000) == {"seconds": 2.0, "step_ms": 20.0, "step_tokens": 50.0}
    assert measured(2.0, 0, 0) == {}


def test_plan_explains_each_choice_with_its_alternatives(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    job = make_job(tmp_path, prompt__on_null="empty")
    plain, explained = ("\n".join(plan_job(job, FakeModels(), explain=wanted)) for wanted in (False, True))
    hint = "; --explain has the settings"
    assert hint in plain
    plain = plain.replace(hint, "")
    assert explained.startswith(plain)
    for words in ("tokens a step: ", "answers at once: ", "speculation: ", "KV cache: float32 (as the job says)"):
        assert words in explained[len(plain) :]
    assert explained.count("first row after") > 10
    (line,) = plan_job(job, FakeModels(), as_json=True)
    assert json.loads(line)["choices"]["settings"]["weights"] == "native"  # float32 computes exactly


def test_what_steps_took_is_kept_and_told_by_later_plans(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    model = tiny.tiny_model("llama3", tmp_path / "model")
    job = make_job(tmp_path, prompt__on_null="empty", model__path=str(model), engine__memory="1MiB")
    assert "the last run" not in "\n".join(plan_job(job, explain=True))
    run(job)
    kept = manifest(job.output_path)["choices"]
    steps = manifest(job.output_path)["speculation"]["steps"]
    took = kept["measured"]
    assert took["seconds"] == pytest.approx(took["step_ms"] * steps / 1000, rel=0.1, abs=0.001) != 0
    assert took["step_tokens"] > 1
    explained = list(plan_job(job, explain=True))
    for name in ("predicted", "measured"):
        (line,) = (line for line in explained if line.startswith(f"the last run, {name}: "))
        assert f"{kept[name]['step_ms']:.1f} ms" in line
    (line,) = plan_job(job, as_json=True)
    assert json.loads(line)["last_run"] == {name: kept[name] for name in ("predicted", "measured")}


def test_plan_refuses_memory_that_holds_no_block(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    job = make_job(tmp_path, prompt__on_null="empty", engine__memory="1KiB")
    with pytest.raises(UsageError, match=r"engine\.memory: 1KiB holds no KV block of \d+ bytes; raise it"):
        list(plan_job(job, FakeModels()))


def test_a_run_refuses_it_alike(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    model = tiny.tiny_model("llama3", tmp_path / "model")
    job = make_job(tmp_path, prompt__on_null="empty", model__path=str(model), engine__memory="1KiB")
    with pytest.raises(UsageError, match=r"engine\.memory: 1KiB holds no KV block of \d+ bytes; raise it"):
        run(job)


class _Small(Models):
    def spec(self, job: Job):
        return SPEC

    def dtype(self, job: Job, place: Place) -> str:
        return "float32"


@pytest.fixture
def micro_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each was allowed to take; they find the built-in rates, tenfold."""
    allowed: list[float] = []

    def calibrate(spec, dtype, device, seconds):
        allowed.append(seconds)
        return replace(built_in(spec, dtype, "cpu", 1e12), basis="measured")

    monkeypatch.setattr(calibration, "calibrate_device", calibrate)
    monkeypatch.setattr(models, "cache_file", lambda: tmp_path / "kept" / "calibration.json")
    monkeypatch.setattr(models, "rates_file", lambda: tmp_path / "kept" / "rates.json")
    return allowed


def test_a_long_job_measures_the_machine_once(tmp_path: Path, micro_runs: list[float]) -> None:
    job = make_job(tmp_path)
    assert _Small().rates(job, HERE).basis == "built in"
    assert _Small().rates(job, HERE, replace(HUGE, rows=2)).basis == "built in"
    assert micro_runs == []
    assert _Small().rates(job, HERE, HUGE).basis == "measured"
    assert micro_runs == [60.0]
    assert _Small().rates(job, HERE).basis == _Small().rates(job, HERE, HUGE).basis == "measured"
    assert len(micro_runs) == 1


def test_a_measurement_that_was_disturbed_is_not_kept(
    tmp_path: Path, micro_runs: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed(*_: object) -> None:
        raise calibration.DisturbedError("too much else")

    good = calibration.calibrate_device
    monkeypatch.setattr(calibration, "calibrate_device", disturbed)
    assert _Small().rates(make_job(tmp_path), HERE, HUGE).basis == "built in"
    monkeypatch.setattr(calibration, "calibrate_device", good)
    assert _Small().rates(make_job(tmp_path), HERE, HUGE).basis == "measured"


def test_time_that_did_not_suffice_is_spent_again_only_by_a_job_with_more_of_it(
    tmp_path: Path, micro_runs: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def slow(spec: object, dtype: str, device: str, seconds: float) -> None:
        given.append(seconds)
        raise calibration.TooLongError("too long")

    monkeypatch.setattr(calibration, "calibrate_device", slow)
    monkeypatch.setattr(models, "machine_rate", lambda _: 1e12)
    monkeypatch.setattr(models, "affordable_seconds", lambda work, rates: work.rows / 1e6)
    job = make_job(tmp_path)
    for seconds in (20, 20, 39, 41):
        assert _Small().rates(job, HERE, replace(HUGE, rows=seconds * 10**6)).basis == "built in"
    assert given == [20, 41]


def test_later_steps_choose_anew_and_keep_the_model(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    steps = [
        {"name": "one", "prompt": {"text": "{{ word }}", "on_null": "empty"}, "generation": {"max_tokens": 1}},
        {"name": "two", "prompt": {"text": "{{ one_completion }} of {{ word }}", "on_null": "empty"}},
    ]
    given = FakeModels()
    run(make_job(tmp_path, prompt=None, steps=steps), models=given)
    assert given.loads == 1
    (adopted,) = given.fake.adopted
    assert adopted.speculation == "auto"
    once, again = given.fake.prepared
    assert again > once > 8  # of memory for the rows of each step: these have longer prompts and answers


def adaptation(answer: float, rows: int = 10_000) -> Adaptation:
    """Of a job whose answers were expected to have `answer` tokens."""
    work = Workload(rows, own=40, common=0, computed=40, answer=answer, longest=1000)
    rates = built_in(replace(SPEC, num_layers=30, hidden_size=576), "bfloat16")
    situation = Situation(_job(), work, rates, "bfloat16", HERE)
    return Adaptation(situation, situation.choose(FORMATS), FORMATS, rows)


FORMATS = {"weights": "native", "kv_cache": "auto"}


def _job() -> Job:
    sections = {"input": {"path": "x.jsonl"}, "prompt": {"text": "x"}, "output": {"path": "out"}}
    return Job.model_validate({"name": "x", "model": {"path": "fake/model"}, "engine": {"memory": "1GiB"}, **sections})


def test_answers_that_turn_out_longer_let_more_run_at_once() -> None:
    adapting = adaptation(answer=2)
    before = adapting.chosen.settings
    assert adapting.finished(adapting.next_look - 1, 0) is None
    asked = adapting.finished(100, 400 * adapting.next_look)
    assert asked is not None
    assert asked.settings.max_sequences > before.max_sequences
    assert asked.settings.weights == before.weights
    change = adapting.took(limits_of(asdict(asked.settings)))
    assert change is not None
    assert change["gain"] > 1.05
    assert change["max_sequences"] == asked.settings.max_sequences
    assert adapting.chosen.settings == asked.settings
    assert adapting.finished(1, 400) is None  # the next look comes at twice as many


def test_what_the_engine_takes_of_changed_limits_is_what_counts() -> None:
    adapting = adaptation(answer=2)
    before = adapting.chosen.settings
    asked = adapting.finished(adapting.next_look + 99, 400 * adapting.next_look)
    assert asked is not None
    assert adapting.took(limits_of(asdict(before))) is None
    assert adapting.chosen.settings == before
    between = (before.max_sequences + asked.settings.max_sequences) // 2
    change = adapting.took({"max_batch_tokens": before.max_batch_tokens, "max_sequences": between})
    assert change is not None
    assert change["max_sequences"] == adapting.chosen.settings.max_sequences == between


def test_the_memory_of_a_graphics_card_is_not_that_of_the_machine() -> None:
    job = _job()
    asking = [job.model_copy(update={"engine": EngineSettings(memory=memory)}) for memory in ("auto", 0.5, "1GiB")]
    card = Place("cuda", "a card")
    assert [choices._memory(one, card) for one in asking] == [math.inf, math.inf, 2**30]
    assert choices._memory(asking[0], HERE) <= 4 * 2**30


def test_keys_are_planned_for_within_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{900 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{100 * 2**20}\n")
    asking = [_job().model_copy(update={"engine": EngineSettings(memory=memory)}) for memory in ("auto", 0.5, "1GiB")]
    assert [choices._memory(one, HERE) for one in asking] == [200 * 2**20, 400 * 2**20, 2**30]
    assert [kv_cache_bytes(one.engine.memory, torch.device("cpu"), 0) for one in asking] == [
        choices._memory(one, HERE) for one in asking
    ]


class _ByKind(_Small):
    def dtype(self, job: Job, place: Place) -> str:
        return {"cpu": "float32", "cuda": "bfloat16"}[place.kind]


def test_a_run_chooses_for_the_device_that_torch_has_whatever_drivers_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_runs: list[float]
) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(processor, "_DRIVER", driver)
    found = {False: Cuda(None, (("NVIDIA H200", (9, 0)),)), True: Cuda("torch is built without CUDA")}
    monkeypatch.setattr(device, "find_cuda", lambda: found[driver.exists()])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(models, "machine_rate", lambda _: 1e12)
    job = make_job(tmp_path)
    for there, runs_on, planned in ((False, "cuda", "cpu"), (True, "cpu", "cuda")):
        driver.write_text("") if there else None
        run_here, plan = (Situation.of(job, _ByKind(), [Request(0, [1, 2])], 4, measure) for measure in (True, False))
        assert (run_here.place.kind, plan.place.kind) == (runs_on, planned)
        assert run_here.dtype == {"cpu": "float32", "cuda": "bfloat16"}[runs_on]
        assert run_here.rates == built_in(SPEC, run_here.dtype, runs_on, 1e12)
        assert math.isinf(choices._memory(job, run_here.place)) == (runs_on == "cuda")


def test_where_a_cluster_computes_is_not_asked_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_cuda", lambda: pytest.fail("asked"))
    job = make_job(tmp_path, engine__device="cuda")
    assert ClusterModels("ray", None, None).place(job).kind == "cuda"


def test_what_comes_as_expected_changes_nothing() -> None:
    adapting = adaptation(answer=100)
    count = adapting.next_look
    assert adapting.finished(count, 100 * count) is None
    assert adapting.next_look == 2 * count


def asked_once(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """The first rows that end ask for these limits."""
    told = iter([limits])

    def finished(adapting: Adaptation, *_: int) -> Chosen | None:
        chosen, asked = adapting.chosen, next(told, None)
        return asked and replace(chosen, settings=replace(chosen.settings, **asked))

    monkeypatch.setattr(Adaptation, "finished", finished)


def test_a_run_hands_changed_limits_to_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_once(monkeypatch, max_batch_tokens=256, max_sequences=48)
    write_rows(tmp_path, 8)
    job, given = make_job(tmp_path, prompt__on_null="empty"), FakeModels()
    run(job, models=given)
    (adopted,) = given.fake.adopted
    assert (adopted.max_batch_tokens, adopted.max_sequences) == (256, 48)
    (change,) = manifest(job.output_path)["choices"]["adapted"]
    assert (change["max_batch_tokens"], change["max_sequences"]) == (256, 48)


def test_limits_that_the_engine_cannot_take_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the start hold: a graphics card has measured memory for no larger ones."""
    asked_once(monkeypatch, max_batch_tokens=1024, max_sequences=1024)
    write_rows(tmp_path, 8)
    limits = {"engine__max_batch_tokens": 64, "engine__max_sequences": 8}
    job, given = make_job(tmp_path, prompt__on_null="empty", **limits), FakeModels()
    given.fake.largest = {"max_batch_tokens": 64, "max_sequences": 8}
    run(job, models=given)
    assert len(given.fake.adopted) == 1
    assert "adapted" not in manifest(job.output_path)["choices"]


def test_limits_that_are_worse_as_the_engine_cut_them_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps were to be smaller for more answers at once; of these the engine takes no more than it had."""
    asked_once(monkeypatch, max_batch_tokens=8, max_sequences=1024)
    write_rows(tmp_path, 8)
    limits = {"engine__max_batch_tokens": 64, "engine__max_sequences": 8}
    job, given = make_job(tmp_path, prompt__on_null="empty", **limits), FakeModels()
    given.fake.largest = {"max_batch_tokens": 64, "max_sequences": 8}
    run(job, models=given)
    assert [(one.max_batch_tokens, one.max_sequences) for one in given.fake.adopted] == [(8, 1024), (64, 8)]
    assert "adapted" not in manifest(job.output_path)["choices"]


def test_the_limits_kept_are_those_that_the_engine_came_to(tmp_path: Path) -> None:
    write_rows(tmp_path, 8)
    job, given = make_job(tmp_path, prompt__on_null="empty"), FakeModels()
    given.fake.largest = {"max_batch_tokens": 48, "max_sequences": 6}
    run(job, models=given)
    kept = manifest(job.output_path)["choices"]
    assert (kept["settings"]["max_batch_tokens"], kept["settings"]["max_sequences"]) == (48, 6)
    values = {choice["name"]: (choice["value"], choice["reason"]) for choice in kept["choices"]}
    assert values["max_batch_tokens"] == (48, choices.KEPT)
    assert values["max_sequences"] == (6, choices.KEPT)
