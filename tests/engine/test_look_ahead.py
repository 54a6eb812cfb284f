"""Planning a step while one is under way: the same answers, the same blocks given back, and work that overlaps."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
import tiny
from drafters import Scripted, adversaries, scripted
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduling import (
    EOS,
    VOCABULARY,
    Bounds,
    PagedModel,
    drive,
    expected_answer,
    next_token,
    prompts_of_a_tree,
)

from batchgen.engine import Engine, Grammar, Request, Sampling
from batchgen.engine import engine as engine_module
from batchgen.engine.blocks import BlockPool, BlockTree
from batchgen.engine.draft.speculation import NO_SPECULATION, Drafting, Eager
from batchgen.engine.intake import Intake
from batchgen.engine.loop import StepLoop
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Drawn, Step
from batchgen.engine.statistics import Statistics


@dataclass
class Recording(PagedModel):
    """Notes what each step feeds, and which tokens it did not know."""

    fed: list[list[tuple[int, int, bool]]] = field(default_factory=list)

    def execute(self, step: Step) -> list[list[Drawn]]:
        self.fed.append([(feed.sequence.task.request.key, feed.count, feed.unknown) for feed in step.feeds])
        return super().execute(step)


def rows(count: int, **sampling) -> list[Request]:
    chosen = Sampling(**{"max_tokens": 6, "temperature": 0, "ignore_eos": True, **sampling})
    return [Request(key, [key, 3, 5], chosen) for key in range(count)]


def test_steps_overlap_and_tokens_are_fed_unseen():
    model = Recording(4)
    finished, statistics = drive(rows(4), model=model, look_ahead=1)
    assert [c.tokens for c in sorted(finished, key=lambda c: c.key)] == [expected_answer(r) for r in rows(4)]
    assert model.fed == [[(key, 3, False) for key in range(4)], *[[(key, 1, True) for key in range(4)]] * 5]
    assert statistics.fed_tokens == 4 * (3 + 5)


def test_without_look_ahead_every_token_is_known():
    model = Recording(4)
    drive(rows(4), model=model)
    assert not any(unknown for step in model.fed for _, _, unknown in step)


def test_an_outcome_is_asked_for_when_the_next_step_is_under_way():
    events: list[str] = []
    intake = Intake(iter(rows(2)), Bounds(256), lambda tokens: "", deque(), Statistics())
    scheduler = Scheduler(intake, BlockTree(BlockPool(64), 4), 16, 8, Statistics())
    model = PagedModel(4)

    def launch(step: Step):
        drawn, number = model.execute(step), sum(event.startswith("launch") for event in events)
        events.append(f"launch {number}")
        return lambda: events.append(f"take {number}") or drawn

    list(StepLoop(scheduler, launch, NO_SPECULATION, 1).run(lambda: False, lambda: intake.exhausted))
    assert events[:6] == ["launch 0", "launch 1", "take 0", "launch 2", "take 1", "launch 3"]
    assert events[-2:] == ["take 4", "take 5"]


def test_an_end_is_noticed_one_step_late_and_its_extra_token_dropped():
    requests = [Request(key, [key, 3], Sampling(max_tokens=30, temperature=0)) for key in range(12)]
    whole = {request.key: expected_answer(request) for request in requests}
    ended = sum(answer[-1] == EOS and len(answer) < 30 for answer in whole.values())
    assert ended >= 3
    finished, ahead = drive(requests, max_sequences=12, num_blocks=200, look_ahead=1)
    assert {completion.key: completion.tokens for completion in finished} == whole
    _, plain = drive(requests, max_sequences=12, num_blocks=200)
    assert ahead.output_tokens == plain.output_tokens
    assert plain.fed_tokens < ahead.fed_tokens <= plain.fed_tokens + ended


def test_rows_that_need_their_token_make_the_next_step_wait():
    """Penalties read it; with more than one such row among eight, no step is planned without them."""
    looking_back = rows(6, presence_penalty=1.0)
    model = Recording(4)
    drive(looking_back, model=model, budget=32, look_ahead=1)
    assert len(model.fed) == 6
    assert all(len(step) == 6 and not any(unknown for _, _, unknown in step) for step in model.fed)


def test_a_few_rows_that_need_their_token_sit_out():
    requests = [*rows(16), Request(16, [9, 9, 9], rows(1, presence_penalty=1.0)[0].sampling)]
    model = Recording(4)
    finished, _ = drive(requests, model=model, max_sequences=17, budget=100, look_ahead=1)
    assert {c.key: c.tokens for c in finished} == {r.key: expected_answer(r) for r in requests}
    assert [len(step) for step in model.fed[:4]] == [17, 16, 17, 16]


def test_a_step_says_whether_a_drafter_was_asked():
    """Nobody is asked to go on behind a token that is still being drawn, or at a prompt with tokens to come."""
    steps: list[Step] = []

    class Opening(Eager):
        def holds(self, step: Step) -> bool:
            return len(steps) % 3 == 0

        def timed(self, step: Step, seconds: float) -> None:
            steps.append(step)

    def drafting(statistics: Statistics) -> Drafting:
        return Drafting(Scripted(lambda tokens, _: 0, [0, 2]), Opening(), VOCABULARY, statistics)

    drive(rows(4, max_tokens=20), drafting=drafting, look_ahead=1)
    asked = [step.tries_drafts for step in steps]
    assert asked == [all(feed.samples and not feed.unknown for feed in step.feeds) for step in steps[:-1]] + [False]
    assert {True, False} <= set(asked)
    assert all(step.tries_drafts for step in steps if any(feed.draft for feed in step.feeds))


def test_an_interrupted_loop_takes_what_is_under_way():
    stop: list[bool] = []
    intake = Intake(iter(rows(2)), Bounds(256), lambda tokens: "", deque(), Statistics())
    scheduler = Scheduler(intake, BlockTree(BlockPool(64), 4), 16, 8, Statistics())
    model, taken = PagedModel(4), []

    def launch(step: Step):
        drawn = model.execute(step)
        if len(taken) == 1:
            stop.append(True)
        return lambda: taken.append(step) or drawn

    list(StepLoop(scheduler, launch, NO_SPECULATION, 1).run(lambda: bool(stop), lambda: intake.exhausted))
    assert len(taken) == 3
    assert not any(sequence.under_way for sequence in scheduler._residents.running)
    scheduler.check_invariants()


@settings(max_examples=60, deadline=None)
@given(
    prompts=prompts_of_a_tree,
    block_size=st.integers(1, 5),
    slack=st.integers(0, 30),
    budget=st.integers(1, 40),
    kind=st.sampled_from(["right", "wrong", "sometimes", "illegal"]),
    seed=st.integers(0, 99),
)
@example(prompts=[[1, 2, 3, 4, 5, 6, 8, 9, 0], [0]], block_size=1, slack=0, budget=4, kind="right", seed=0)
def test_drafts_ends_penalties_and_little_memory(prompts, block_size, slack, budget, kind, seed):
    """Everything at once that makes a step wait, or its outcome void."""
    chosen = random.Random(seed)
    requests = [
        Request(
            key,
            prompt,
            Sampling(max_tokens=chosen.randint(1, 12), temperature=0, presence_penalty=chosen.choice((0, 1))),
        )
        for key, prompt in enumerate(prompts)
    ]
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests)
    finished, _ = drive(
        requests,
        num_blocks=-(-longest // block_size) + slack // block_size,
        block_size=block_size,
        budget=budget,
        look_ahead=1,
        drafting=scripted(adversaries(lambda tokens, _: next_token(tokens), VOCABULARY)[kind], (0, 2, 5), VOCABULARY),
    )
    assert {c.key: c.tokens for c in finished} == {r.key: expected_answer(r) for r in requests}


# the engine on tiny models, one step ahead on the CPU


SAMPLINGS = {
    "greedy": Sampling(max_tokens=9, temperature=0),
    "n": Sampling(max_tokens=7, temperature=1.2, n=3),
    "filters": Sampling(max_tokens=8, temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": Sampling(max_tokens=8, temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4),
    "min tokens": Sampling(max_tokens=8, temperature=1.0, min_tokens=3, stop_token_ids=tuple(range(6, 200))),
    "stop strings": Sampling(max_tokens=12, temperature=1.0, stop=("e", "th", "o")),
    "logprobs": Sampling(max_tokens=5, temperature=0.7, logprobs=3),
    "choices": Sampling(max_tokens=20, temperature=0, grammar=Grammar.choices(["the", "the fox", "over"])),
    "scored choices": Sampling(max_tokens=9, temperature=0, grammar=Grammar.choices(["a", "fox"]), choice_probs=True),
    "one token": Sampling(max_tokens=1, temperature=0),
}


def prompts() -> list[list[int]]:
    long_start, short_start = tiny.random_prompt(37, seed=1), tiny.random_prompt(11, seed=2)
    found = [long_start + tiny.random_prompt(3 + i, seed=10 + i) for i in range(3)]
    return [*found, short_start + [9, 8, 7] * 4, long_start, [*long_start[:20], 7, 8, 9], short_start[:1]]


def requests_of(*names: str) -> list[Request]:
    return [
        Request(100 * number + key, prompt, SAMPLINGS[name])
        for number, name in enumerate(SAMPLINGS)
        if not names or name in names
        for key, prompt in enumerate(prompts())
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(family: str):
        if family not in made:
            made[family] = tiny.tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def outcomes(engine: Engine, requests: list[Request]) -> dict:
    found = {}
    for completion in engine.run(iter(requests)):
        assert completion.error is None
        found[completion.key] = (completion.samples, completion.choice_probs)
    return found


def ahead(monkeypatch, folder, **settings) -> Engine:
    monkeypatch.setitem(engine_module.LOOK_AHEAD, "cpu", 1)
    return load(folder, **settings)


def load(folder, **settings) -> Engine:
    return Engine.load(
        str(folder), device="cpu", dtype="float32", **{"memory": "1MiB", "speculation": "off", **settings}
    )


def rounded(outcome: dict) -> dict:
    """Tokens and reasons exactly; log-probabilities and probabilities to five digits: sums depend on the batch."""
    return {
        key: (
            [(one.tokens, one.finish_reason, _rounded(one.logprobs)) for one in samples],
            probabilities and [pytest.approx(value, abs=1e-5) for value in probabilities],
        )
        for key, (samples, probabilities) in outcome.items()
    }


def _rounded(logprobs):
    return logprobs and [(one.token_id, round(one.logprob, 3), [token for token, _ in one.top]) for one in logprobs]


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_every_kind_of_row_in_every_family(folders, family, monkeypatch):
    expected = outcomes(load(folders(family)), requests_of())
    engine = ahead(monkeypatch, folders(family), block_size=8, max_batch_tokens=48)
    assert outcomes(engine, requests_of()).keys() == expected.keys()
    assert engine._runner.latest == []  # nothing of a run that is over is kept
    assert rounded(outcomes(engine, requests_of())) == rounded(expected)


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_each_kind_alone(folders, name, monkeypatch):
    """Alone, so that rows that can go ahead do, and rows that cannot wait together."""
    expected = outcomes(load(folders("llama3")), requests_of(name))
    engine = ahead(monkeypatch, folders("llama3"), block_size=4, max_sequences=6)
    unknown: list[bool] = []
    launch = engine._runner.launch
    monkeypatch.setattr(
        type(engine._runner),
        "launch",
        lambda self, step: unknown.extend(feed.unknown for feed in step.feeds) or launch(step),
    )
    assert rounded(outcomes(engine, requests_of(name))) == rounded(expected)
    assert any(unknown) == (name not in ("penalties", "choices", "scored choices", "one token"))


@pytest.mark.parametrize("kind", ["ngram", "suffix", "auto", "layer_skip"])
def test_speculation(folders, kind, monkeypatch):
    names = "greedy", "filters", "penalties", "stop strings"
    expected = outcomes(load(folders("llama3")), requests_of(*names))
    engine = ahead(monkeypatch, folders("llama3"), speculation=kind, max_sequences=8)
    assert rounded(outcomes(engine, requests_of(*names))) == rounded(expected)
    assert kind == "auto" or engine.statistics.drafted_tokens > 0


def test_preemption(folders, monkeypatch):
    folder = folders("smollm2")
    short = [
        Request(9000 + i, [6 + i], Sampling(max_tokens=60, temperature=0, stop_token_ids=tuple(range(288))))
        for i in range(64)
    ]
    expected = outcomes(load(folder), requests_of("greedy", "n", "penalties"))
    token = load(folder).model.kv_shape().bytes_per_token
    engine = ahead(monkeypatch, folder, block_size=4, memory=26 * 4 * token, max_batch_tokens=64)
    found = outcomes(engine, [*short, *requests_of("greedy", "n", "penalties")])
    assert engine.statistics.preemptions > 0
    assert rounded({key: found[key] for key in expected}) == rounded(expected)


def test_a_step_that_raises_costs_only_the_row_at_fault(folders, monkeypatch):
    requests = requests_of("greedy")
    expected = outcomes(load(folders("llama3")), requests)
    engine = ahead(monkeypatch, folders("llama3"))
    real, bad = engine.model.forward, requests[3].prompt[-3:]

    def fails(batch, pages):
        tokens = batch.tokens.tolist()
        if any(tokens[i : i + 3] == bad for i in range(len(tokens))):
            raise RuntimeError("kernel fault")
        return real(batch, pages)

    engine.model.forward = fails
    finished = {completion.key: completion for completion in engine.run(iter(requests))}
    failed = {key for key, completion in finished.items() if completion.error}
    assert failed == {requests[3].key}
    assert all(finished[key].samples == expected[key][0] for key in finished if key not in failed)
