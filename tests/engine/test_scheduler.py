"""The scheduler against a model made of arithmetic: every answer, every block and every computed token is known."""

import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduling import (
    TREE_START,
    VOCABULARY,
    Bounds,
    PagedModel,
    distinct_prefix_tokens,
    drive,
    expected_answer,
    prompts_of_a_tree,
)

from batchgen.engine import intake
from batchgen.engine.blocks import BlockPool, BlockTree
from batchgen.engine.intake import Intake
from batchgen.engine.request import Request, RowError, Sampling
from batchgen.engine.residents import EngineStalledError
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Drawn, Step
from batchgen.engine.statistics import Statistics


def greedy(max_tokens: int, **others) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0, **others)


@settings(max_examples=300, deadline=None)
@example(  # a preempted row whose own blocks nobody but the pin of the next one holds, and which it cannot match
    prompts=[[0], [*TREE_START, 0], [*TREE_START, *[0] * 4], [*TREE_START, *[0] * 9]],
    block_size=1,
    slack=28,
    budget=16,
    max_sequences=2,
    sharing=False,
    planned=False,
    temperature=0.0,
    seed=13,
    look_ahead=0,
)
@given(
    prompts=prompts_of_a_tree,
    block_size=st.integers(1, 9),
    slack=st.integers(0, 40),
    budget=st.integers(1, 40),
    max_sequences=st.integers(1, 12),
    sharing=st.booleans(),
    planned=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    look_ahead=st.integers(0, 1),
)
def test_every_row_gets_its_answer_whatever_the_limits(
    prompts, block_size, slack, budget, max_sequences, sharing, planned, temperature, seed, look_ahead
):
    lengths = random.Random(seed)
    requests = [
        Request(
            key, prompt, Sampling(max_tokens=lengths.randint(1, 20), temperature=temperature, n=lengths.randint(1, 3))
        )
        for key, prompt in enumerate(sorted(prompts) if planned else prompts)
    ]
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests)
    num_blocks = -(-longest // block_size) + slack // block_size
    finished, _statistics = drive(
        requests,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=budget,
        max_sequences=max_sequences,
        sharing=sharing,
        look_ahead=look_ahead,
    )
    assert sorted(completion.key for completion in finished) == list(range(len(requests)))
    for completion in finished:
        request = requests[completion.key]
        answers = [sample.tokens for sample in completion.samples]
        assert answers == [expected_answer(request, sample) for sample in range(request.sampling.n)]
        assert completion.error is None
        assert completion.usage.prompt_tokens == len(request.prompt)
        assert 0 <= completion.usage.cached_tokens <= len(request.prompt)


@settings(max_examples=400, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=10),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 40),
    max_sequences=st.integers(1, 6),
    samples=st.integers(1, 3),
    look_ahead=st.integers(0, 1),
)
def test_equal_and_extended_prompts_that_sample(prompts, block_size, budget, max_sequences, samples, look_ahead):
    sampling = Sampling(max_tokens=4, temperature=1.0, n=samples)
    requests = [Request(key, prompt, sampling) for key, prompt in enumerate(sorted(prompts))]
    limits = {"block_size": block_size, "budget": budget, "max_sequences": max_sequences}
    finished, _ = drive(requests, **limits, look_ahead=look_ahead)
    for completion in finished:
        expected = [expected_answer(requests[completion.key], sample) for sample in range(samples)]
        assert [sample.tokens for sample in completion.samples] == expected
    assert len(finished) == len(requests)


def test_a_block_donated_whole_can_be_matched():
    start = list(range(8))
    prompts = [start, start, [*start, 1, 2, 3, 4, 5], [*start, 1, 2, 9]]
    requests = [Request(key, prompt, Sampling(max_tokens=2)) for key, prompt in enumerate(prompts)]
    finished, statistics = drive(requests, max_sequences=1)
    assert len(finished) == 4
    assert statistics.computed_prompt_tokens == 8 + 1 + 5 + 1


@settings(max_examples=200, deadline=None)
@given(
    prompts=prompts_of_a_tree,
    block_size=st.integers(1, 9),
    budget=st.integers(1, 64),
    extra=st.integers(1, 64),
    look_ahead=st.integers(0, 1),
)
def test_in_plan_order_every_distinct_prefix_token_is_computed_once(prompts, block_size, budget, extra, look_ahead):
    prompts = sorted(map(list, {tuple(prompt) for prompt in prompts}))
    requests = [Request(key, prompt, greedy(3, ignore_eos=True)) for key, prompt in enumerate(prompts)]
    longest = max(map(len, prompts)) + 3
    num_blocks = -(-longest // block_size) + 1 + extra
    limits = {"num_blocks": num_blocks, "block_size": block_size, "budget": budget}
    _, statistics = drive(requests, **limits, look_ahead=look_ahead)
    lasts = sum(any(other[: len(p)] == p for other in prompts if other is not p) for p in prompts)
    bound = distinct_prefix_tokens(prompts)
    assert statistics.computed_prompt_tokens - statistics.recomputed_tokens <= bound + lasts
    if statistics.preemptions == 0:
        assert statistics.computed_prompt_tokens >= bound


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_answers_longer_than_foreseen_are_preempted_and_still_right(look_ahead):
    def ends_only_late(key):  # every token but the last two thirds of the rows' ends the answer at once
        return greedy(30, stop_token_ids=tuple(range(VOCABULARY)) if key < 80 else (VOCABULARY - 1,), ignore_eos=True)

    requests = [Request(key, [key % 50, key // 50, 2], ends_only_late(key)) for key in range(100)]
    finished, statistics = drive(requests, num_blocks=20, block_size=4, budget=64, look_ahead=look_ahead)
    assert statistics.preemptions > 0
    assert statistics.recomputed_tokens > 0
    outcome = {completion.key: completion for completion in finished}
    for request in requests[80:]:
        whole = expected_answer(request)
        end = whole.index(VOCABULARY - 1) + 1 if VOCABULARY - 1 in whole else len(whole)
        assert outcome[request.key].tokens == whole[:end]


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_siblings_wait_for_a_prefix_that_is_being_computed(look_ahead):
    prefix = list(range(20)) + list(range(20))
    requests = [Request(key, [*prefix, key], greedy(2, ignore_eos=True)) for key in range(10)]
    _, statistics = drive(requests, budget=16, look_ahead=look_ahead)
    assert statistics.computed_prompt_tokens == len(prefix) + 10


class Watching(PagedModel):
    """Notes how many tokens of each row every step feeds."""

    def __init__(self, block_size):
        super().__init__(block_size)
        self.steps = []

    def execute(self, step: Step):
        self.steps.append([feed.count for feed in step.feeds])
        return super().execute(step)


def test_prompts_are_fed_one_after_the_other():
    """In steps that cannot hold all of them none is fed in pieces of a token."""
    model = Watching(4)
    tails = [[5], *([6 + key] * 8 for key in range(6))]
    requests = [Request(key, [1, 2, 3, 4, *tail], greedy(8, ignore_eos=True)) for key, tail in enumerate(tails)]
    drive(requests, budget=16, model=model)
    assert model.steps[:4] == [[5], [1, 8, 7], [1, 1, 1, 8, 5], [1, 1, 1, 1, 3, 8, 1]]


def test_prompts_with_a_forced_opening_are_fed_one_after_the_other(monkeypatch):
    """Tokens of an answer that are known before its prompt is computed do not make it one that goes on."""
    monkeypatch.setattr(intake, "opening_tokens", lambda task: [5, 5])
    model = Watching(4)
    tails = [[5], *([6 + key] * 8 for key in range(6))]
    requests = [Request(key, [1, 2, 3, 4, *tail], greedy(8, ignore_eos=True)) for key, tail in enumerate(tails)]
    drive(requests, budget=16, model=model)
    assert model.steps[:3] == [[7], [1, 10, 5], [1, 1, 5, 9]]


def test_few_are_let_in_to_wait_for_a_prefix():
    """Those that wait hold blocks; a few of them have the tokens of the next step."""
    tails = [[5], *([6 + key] * 96 for key in range(40))]
    requests = [Request(key, [1, 2, 3, 4, *tail], greedy(2, ignore_eos=True)) for key, tail in enumerate(tails)]
    model = Watching(4)
    _, statistics = drive(requests, num_blocks=1200, budget=64, max_sequences=40, model=model)
    assert statistics.kv_blocks_peak < 300
    assert all(sum(counts) == 64 for counts in model.steps[1:-2])


def test_a_branch_inside_a_block_copies_it():
    requests = [Request(0, [1, 2, 3, 4, 5, 6, 9], greedy(2)), Request(1, [1, 2, 3, 4, 5, 6, 8], greedy(2))]
    finished, statistics = drive(requests)
    assert statistics.copied_blocks == 1
    assert {completion.key: completion.usage.cached_tokens for completion in finished} == {0: 0, 1: 6}


def test_equal_greedy_rows_are_computed_once():
    requests = [Request(key, [1, 2, 3], greedy(5, ignore_eos=True, seed=key)) for key in range(1000)]
    finished, statistics = drive(requests)
    assert len(finished) == 1000
    assert statistics.output_tokens == 5
    assert statistics.duplicates == 999
    assert sorted(completion.usage.cached_tokens for completion in finished) == [0] + [3] * 999


def test_equal_rows_that_sample_are_not_merged():
    requests = [Request(key, [1, 2, 3], Sampling(max_tokens=5, ignore_eos=True)) for key in range(4)]
    finished, statistics = drive(requests)
    assert len({tuple(completion.tokens) for completion in finished}) == 4
    assert statistics.duplicates == 0
    assert statistics.computed_prompt_tokens == 3 + 3  # the last prompt token again for each of the three others


def test_greedy_samples_of_one_row_are_one_computation():
    finished, statistics = drive([Request(0, [1, 2], greedy(4, n=3, ignore_eos=True))])
    assert finished[0].tokens == [expected_answer(Request(0, [1, 2], greedy(4, ignore_eos=True)))] * 3
    assert statistics.output_tokens == 4
    assert finished[0].usage.completion_tokens == 12


def test_interleaved_groups_still_share_while_rows_are_alive():
    groups = [[base + i for i in range(16)] for base in (0, 16, 32)]
    requests = [Request(i, [*groups[i % 3], i % 50], greedy(2, ignore_eos=True)) for i in range(12)]
    _, statistics = drive(requests, budget=64, max_sequences=12)
    assert statistics.computed_prompt_tokens == 3 * 16 + 12


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request(0, [], greedy(1)), "empty_prompt"),
        (Request(0, [VOCABULARY], greedy(1)), "bad_params"),
        (Request(0, [1.5], greedy(1)), "bad_params"),
        (Request(0, ["a"], greedy(1)), "bad_params"),
        (Request(0, None, greedy(1)), "bad_params"),
        (Request(0, [-1], greedy(1)), "bad_params"),
        (Request(0, [1], greedy(1, stop_token_ids=(99_999,))), "bad_params"),
        (Request(0, [1] * 9_999, greedy(2)), "context_length"),
        (Request(0, [1] * 200, greedy(100)), "engine"),
        (Request(0, [1], greedy(1), error=RowError("template", "prompt", "no")), "template"),
    ],
)
def test_a_row_that_cannot_run_is_refused_alone(request_, code):
    good = Request(1, [1, 2], greedy(3))
    finished, _ = drive([request_, good])
    outcome = {completion.key: completion for completion in finished}
    assert outcome[0].error.code == code
    assert outcome[0].finish_reason == "error"
    assert outcome[1].tokens == expected_answer(good)


def test_row_too_large_for_the_memory_names_both_sizes():
    finished, _ = drive([Request(0, [1] * 200, greedy(100))], num_blocks=64, block_size=4)
    assert "200" in finished[0].error.message
    assert "256" in finished[0].error.message
    assert finished[0].error.retryable


@dataclass
class FaultyModel(PagedModel):
    """Reports an error for one row at its first token."""

    bad_key: int = 0

    def draw_at(self, point) -> Drawn:
        if point.sequence.task.request.key == self.bad_key:
            return Drawn(error=RowError("numeric", "generate", "NaN"))
        return super().draw_at(point)


@pytest.mark.parametrize("bad_key", range(5))
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("look_ahead", [0, 1])
def test_a_row_that_fails_leaves_its_siblings_whole(bad_key, budget, look_ahead):
    prefix = list(range(30))
    requests = [Request(key, [*prefix, key], Sampling(max_tokens=4, n=2)) for key in range(5)]
    finished, _ = drive(requests, budget=budget, model=FaultyModel(4, bad_key=bad_key), look_ahead=look_ahead)
    for completion in finished:
        if completion.key == bad_key:
            assert completion.error.code == "numeric"
            assert completion.tokens is None
        else:
            assert completion.tokens == [expected_answer(requests[completion.key], sample) for sample in (0, 1)]
    assert len(finished) == 5


@dataclass
class FailsInThePrompt(PagedModel):
    """The leader fails before its prompt is computed, while its siblings wait for it."""

    def execute(self, step: Step) -> list[list[Drawn]]:
        results = super().execute(step)
        for index, feed in enumerate(step.feeds):
            if feed.sequence.task.request.key == 0 and feed.start + feed.count > 8:
                results[index] = [Drawn(error=RowError("engine", "generate", "raised"))]
        return results


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_siblings_of_a_leader_that_fails_start_over(look_ahead):
    prefix = list(range(30))
    requests = [Request(key, [*prefix, key], greedy(3)) for key in range(5)]
    finished, _ = drive(requests, budget=8, model=FailsInThePrompt(4), look_ahead=look_ahead)
    outcome = {completion.key: completion for completion in finished}
    assert outcome[0].error.code == "engine"
    assert all(outcome[key].tokens == expected_answer(requests[key]) for key in range(1, 5))


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31])
@pytest.mark.parametrize("look_ahead", [0, 1])
def test_an_impossible_token_is_the_row_s_error(token, look_ahead):
    class Impossible(PagedModel):
        def draw_at(self, point):
            return Drawn(token) if point.sequence.task.request.key == 1 else super().draw_at(point)

    requests = [Request(key, [key, 5], greedy(3)) for key in range(3)]
    finished, _ = drive(requests, model=Impossible(4), look_ahead=look_ahead)
    outcome = {completion.key: completion for completion in finished}
    assert outcome[1].error.code == "engine"
    assert str(token) in outcome[1].error.message
    assert outcome[2].tokens == expected_answer(requests[2])


def test_pulls_only_as_there_is_room():
    pulled = []

    def endless():
        for key in range(10**9):
            pulled.append(key)
            yield Request(key, [key % VOCABULARY, key // VOCABULARY % VOCABULARY, 3], greedy(4, ignore_eos=True))

    pool = BlockPool(32)
    intake = Intake(endless(), Bounds(128), lambda tokens: "", deque(), Statistics())
    scheduler = Scheduler(intake, BlockTree(pool, 4), 16, 8, Statistics())
    model = PagedModel(4)
    for _ in range(20):
        step = scheduler.schedule()
        drawn = model.execute(step)
        scheduler.launched(step)
        scheduler.commit(step, drawn)
    assert len(list(scheduler.take_finished())) > 8
    assert len(pulled) < 100


def test_many_refused_rows_are_handed_out_in_pieces():
    requests = (Request(key, [], greedy(1)) for key in range(20_000))
    intake = Intake(requests, Bounds(128), lambda tokens: "", deque(), Statistics())
    scheduler = Scheduler(intake, BlockTree(BlockPool(8), 4), 16, 8, Statistics())
    most = total = 0
    while not intake.exhausted:
        assert scheduler.schedule() is None
        batch = list(scheduler.take_finished())
        most, total = max(most, len(batch)), total + len(batch)
    assert total == 20_000
    assert most < 5_000


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_thrashing_is_bounded(look_ahead):
    requests = [Request(key, [key] * 24, greedy(3, ignore_eos=True)) for key in range(20)]
    _, statistics = drive(requests, num_blocks=10, block_size=4, budget=64, look_ahead=look_ahead)
    assert statistics.computed_prompt_tokens <= 1.2 * 20 * 24


def test_no_progress_raises_instead_of_hanging():
    pool = BlockPool(4)
    intake = Intake(iter([Request(0, [1] * 12, greedy(4))]), Bounds(16), lambda tokens: "", deque(), Statistics())
    scheduler = Scheduler(intake, BlockTree(pool, 4), 16, 8, Statistics())
    pool.take(2)  # blocks that somebody lost
    with pytest.raises(EngineStalledError, match="2 of 4 KV blocks free"):
        scheduler.schedule()


def test_hundred_thousand_rows_leave_nothing_behind():
    requests = (Request(key, [key % 50, key // 50 % 50, key // 2500], greedy(1)) for key in range(20_000))
    finished, statistics = drive(requests, num_blocks=64, block_size=4, budget=64, max_sequences=32)
    assert len(finished) == 20_000
    assert statistics.kv_blocks_peak <= 64


def test_waiting_for_the_next_row_is_counted_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(intake, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: clock[0])}))

    def slow():
        for key in range(3):
            clock[0] += 2.0
            yield Request(key, [1, 2, key], greedy(1))

    statistics = Statistics()
    taken = Intake(slow(), Bounds(100), lambda tokens: "", deque(), statistics)
    while (head := taken.head()) is not None:
        taken.pop()
        clock[0] += 50.0  # the engine is busy with `head`
    assert head is None
    assert taken.exhausted
    assert statistics.host_wait_seconds == 6.0


def test_limits_change_between_steps_once_all_that_run_fit_the_step():
    requests = [Request(key, [key, 1, 2], Sampling(max_tokens=12, temperature=0)) for key in range(12)]
    statistics = Statistics(kv_blocks_total=64)
    intake = Intake(iter(requests), Bounds(256), lambda tokens: "", deque(), statistics)
    scheduler = Scheduler(intake, BlockTree(BlockPool(64), 4), 64, 8, statistics)
    model, sizes, done = PagedModel(4), [], 0
    while (step := scheduler.schedule()) is not None:
        sizes.append((len(step.feeds), step.num_tokens))
        drawn = model.execute(step)
        scheduler.launched(step)
        scheduler.commit(step, drawn)
        done += sum(1 for _ in scheduler.take_finished())
        if len(sizes) == 3:
            scheduler.adopt(4, 2)
    assert done == 12
    assert sizes[3][0] == 8  # eight run: a step of four tokens would starve some
    later = sizes[-6:]
    assert all(feeds <= 2 and tokens <= 4 for feeds, tokens in later)


def test_limits_asked_for_while_others_are_taken_come_next(monkeypatch):
    requests = [Request(key, [key, 1, 2], Sampling(max_tokens=12, temperature=0)) for key in range(12)]
    statistics = Statistics(kv_blocks_total=64)
    intake = Intake(iter(requests), Bounds(256), lambda tokens: "", deque(), statistics)
    scheduler = Scheduler(intake, BlockTree(BlockPool(64), 4), 64, 8, statistics)
    taken, limit = [], scheduler._admission.limit

    def limit_and_ask(*limits):
        """Stands for another thread."""
        limit(*limits)
        taken.append(limits)
        if len(taken) == 1:
            scheduler.adopt(16, 4)

    monkeypatch.setattr(scheduler._admission, "limit", limit_and_ask)
    scheduler.adopt(32, 6)
    scheduler._take_limits()
    assert scheduler._max_batch_tokens == 32
    scheduler._take_limits()
    assert scheduler._max_batch_tokens == 16
    scheduler._take_limits()
    assert taken == [(32, 6), (16, 4)]
