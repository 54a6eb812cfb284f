"""The policy of `auto` on a machine made of a formula: on where drafts pay, off where not, never much slower."""

from collections import deque

import pytest
from drafted_runs import DRAFT, Machine, Row, gain, step_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.engine.draft.acceptance import Acceptance
from batchgen.engine.draft.controller import PLAIN_EVERY, Controller, decodes_only
from batchgen.engine.draft.laggards import chances_to_be_last
from batchgen.engine.draft.speculation import Draft
from batchgen.engine.draft.times import RIDGE, AddedSeconds, StepTimes, assumed_per_token

FLAT = Machine(fixed=0, token=0.0017, floor=0.02)  # up to 12 tokens
LINEAR = Machine(fixed=0.002, token=0.001)
INT8 = Machine(fixed=0.0062, token=0.00027, floor=0.007, asking=0.00001)  # as SmolLM2 on two cores
WIDE = Machine(fixed=0.006, token=0.00002, floor=0.008, asking=0.00001)  # as a graphics card

machines = st.builds(
    lambda fixed, token, ridge, asking, noise: Machine(fixed, token, fixed + token * ridge, asking, noise),
    fixed=st.floats(0, 0.02),
    token=st.floats(1e-5, 2e-3),
    ridge=st.integers(RIDGE, 300),
    asking=st.floats(0, 1e-5),
    noise=st.sampled_from([0.0, 0.1]),
)


# what it comes to


@pytest.mark.parametrize("accept", [0.5, 0.7, 0.95])
def test_below_the_ridge_drafts_are_nearly_free_and_taken(accept):
    times, outcome = gain(FLAT, lambda: [Row(256, accept) for _ in range(3)], 3)
    assert outcome.drafted > outcome.steps
    assert times > 1 + accept / 2


@pytest.mark.parametrize("accept", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_past_the_ridge_poor_drafts_cost_next_to_nothing(accept, noise):
    machine = Machine(LINEAR.fixed, LINEAR.token, noise=noise)
    times, outcome = gain(machine, lambda: [Row(200, accept) for _ in range(64)], 64)
    assert times > 0.98
    assert outcome.drafted < outcome.steps


def test_past_the_supposed_ridge_larger_steps_are_tried_and_kept_when_they_are_cheap():
    times, outcome = gain(WIDE, lambda: [Row(256, 0.8) for _ in range(16)], 16)
    assert outcome.drafted > 20 * outcome.steps
    assert times > 2


def test_one_disturbed_step_does_not_end_drafting_for_good():
    """The first step with drafts takes three times as long as they could: tables are built, memory is touched."""
    machine = Machine(fixed=0.0057, token=0.00035, asking=0.00001, first=0.02)
    times, outcome = gain(machine, lambda: [Row(48 + 8 * (index % 3), 0.8) for index in range(96)], 16)
    assert outcome.drafted > outcome.steps
    assert times > 1.1


def test_it_wakes_in_the_drain():
    """64 at a time, until four long ones are left."""
    rows = [*(Row(600, 0.8) for _ in range(4)), *(Row(40, 0.8) for _ in range(300))]
    times, outcome = gain(FLAT, lambda: [Row(row.length, row.accept) for row in rows], 64)
    assert times > 1.1
    assert outcome.drafted > 500


def test_the_row_that_holds_up_the_end_is_drafted_for_and_the_others_are_not():
    """One answer is twice as long as 27 others, whose drafts a step of 28 tokens has no room for."""
    rows = [200, *[100] * 27]
    times, outcome = gain(INT8, lambda: [Row(length, 0.6) for length in rows], 28)
    assert times > 1.15
    assert outcome.drafted < 8 * 200


def test_rows_that_end_early_anyway_are_not_worth_a_draft():
    """Half are drafted well and half are not: only the latter decide when the run is over."""
    times, _ = gain(INT8, lambda: [Row(256, 0.95 * (index % 2)) for index in range(64)], 64)
    assert times > 0.98


@settings(max_examples=40, deadline=None)
@given(
    machine=machines,
    accept=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    lengths=st.lists(st.integers(80, 240), min_size=1, max_size=4),
    count=st.integers(1, 40),
    at_once=st.sampled_from([2, 12, 40]),
    certain=st.booleans(),
    seed=st.integers(0, 9),
)
@example(LINEAR, [0.85], [256], 23, 23, True, 0)  # drafts that nearly pay
def test_it_is_never_much_slower_than_without_drafts(machine, accept, lengths, count, at_once, certain, seed):
    """At most eight steps and a fiftieth of the run: what it costs to find out.

    Where nobody knows which answer is the longest, all are drafted for alike.
    """

    def rows():
        likely = accept if certain else accept[:1]
        return [Row(lengths[index % len(lengths)], likely[index % len(likely)], certain) for index in range(count)]

    times, outcome = gain(machine, rows, at_once, seed)
    step = machine.seconds(min(count, at_once)) * (1 + machine.noise)
    assert outcome.seconds < 1.02 * times * outcome.seconds + 8 * step


# its parts


def test_steps_that_compute_prompts_are_left_alone():
    rows = [Row(100, 0.9) for _ in range(3)]
    for row in rows:
        row.sequence.tokens += [1] * 4
    step = step_of([row.sequence for row in rows], counts=[1, 1, 5])
    controller = Controller()
    assert not decodes_only(step)
    assert not any(controller.opens(step) for _ in range(PLAIN_EVERY * 2))


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_a_step_without_drafts_takes_is_measured_whatever_was_planned_since(ahead):
    """The scheduler plans a step, and so asks the policy, before it hears how long the one under way took."""
    controller, under_way, plain = Controller(), deque(), []
    measure = controller._plain.measure
    controller._plain.measure = lambda size, seconds: (plain.append(seconds), measure(size, seconds))
    sequences = [Row(5000, 1.0).sequence for _ in range(4)]
    for _ in range(10 * PLAIN_EVERY):
        opened = controller.opens(step_of(sequences))
        lengths = [0] * 4
        if opened:
            controller.asked(4, 0.0)
            lengths = controller.lengths(dict.fromkeys(sequences, DRAFT), step_of(sequences))
        under_way.append(step_of(sequences, lengths, tries_drafts=opened))
        if len(under_way) > ahead:
            step = under_way.popleft()
            controller.timed(step, 0.021 if step.tries_drafts else 0.02)
            for feed in step.feeds:
                controller.verified(feed.sequence, DRAFT.cut(len(feed.draft)), len(feed.draft))
    assert len(plain) >= 5
    assert set(plain) == {0.02}


@pytest.mark.parametrize(("asking", "least", "most"), [(1e-6, 80, 150), (2e-3, 5, 40)])
def test_a_drafter_that_finds_nothing_is_asked_ever_less_when_that_takes_time(asking, least, most):
    controller, times = Controller(), 0
    sequences = [Row(5000, 1.0).sequence for _ in range(8)]
    for _ in range(200):
        opened = controller.opens(step_of(sequences))
        if opened:
            times += 1
            controller.asked(8, asking)
            assert controller.lengths(dict.fromkeys(sequences, DRAFT.cut(0)), step_of(sequences)) == [0] * 8
        controller.timed(step_of(sequences, tries_drafts=opened), 0.02 + asking * opened)
    assert least < times < most


def test_a_drafter_that_sleeps_is_asked_again_when_half_the_answers_are_left():
    controller, sequences = Controller(), [Row(5000, 1.0).sequence for _ in range(8)]

    def asked(count: int) -> bool:
        opened = controller.opens(step_of(sequences[:count]))
        if opened:
            controller.asked(count, 2e-4 * count)
            controller.lengths(dict.fromkeys(sequences[:count], DRAFT.cut(0)), step_of(sequences[:count]))
        controller.timed(step_of(sequences[:count], tries_drafts=opened), 0.02)
        return opened

    seldom = [asked(8) for _ in range(200)]
    while not asked(8):
        pass
    assert not any(asked(8) for _ in range(6))
    assert sum(seldom) < 40
    assert any(asked(4) for _ in range(6))


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=30), draining=st.booleans())
def test_the_longer_an_answer_the_likelier_it_ends_last(lengths, draining):
    rows = [Row(length, 0.5) for length in lengths]
    chances = chances_to_be_last(step_of([row.sequence for row in rows], draining=draining))
    assert sum(chances) == pytest.approx(1)
    if draining:
        assert [chance for _, chance in sorted(zip(lengths, chances, strict=True))] == sorted(chances)
    else:
        assert set(chances) == {1 / len(lengths)}


def test_answers_that_may_end_at_any_token_are_equally_likely_to_be_last():
    rows = [Row(10, 0.5), Row(400, 0.5, certain=False)]
    assert chances_to_be_last(step_of([row.sequence for row in rows], draining=True)) == [0.5, 0.5]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    fixed=st.floats(0.001, 0.1),
    token=st.floats(0, 0.001),
)
def test_step_times_come_to_what_is_measured_again_and_again(sizes, fixed, token):
    times = StepTimes()
    for size in sizes * 30:
        times.measure(size, fixed + token * size)
    for size in sizes:
        assert times.seconds(size) == pytest.approx(fixed + token * size, rel=0.02)
    assert times.seconds(10 * max(sizes)) >= times.seconds(max(sizes))
    assert times.seconds(1) <= times.seconds(min(sizes)) * (1 + 1e-9)


@pytest.mark.parametrize(("few", "found"), [(4, 0.001), (8, 0.001), (9, 0.7)])
def test_what_a_sequence_adds_is_known_when_half_as_many_were_measured(few, found):
    times = StepTimes()
    assert times.per_sequence(16, 0.7) == 0.7
    for size in [few, 16] * 30:
        times.measure(size, 0.01 + 0.001 * size)
    assert times.per_sequence(16, 0.7) == pytest.approx(found, rel=0.05)


def test_a_machine_that_slows_down_does_so_for_steps_of_every_size():
    times = StepTimes()
    times.measure(64, 0.02)
    times.measure(56, 0.018)
    for _ in range(4):
        times.measure(60, 1.3 * 0.019)
    assert times.seconds(64) > 1.15 * 0.02
    assert times.seconds(56) > 1.15 * 0.018


def test_one_slow_step_counts_as_half_again_as_slow_at_most():
    times = StepTimes()
    times.measure(64, 0.02)
    times.measure(64, 1.0)
    assert times.seconds(64) < 0.03
    times.measure(48, 1.0)  # of a size that was not measured before
    assert times.seconds(48) < 0.04


@given(
    added=st.floats(0, 1e-3),
    steps=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=20),
)
def test_what_drafted_tokens_add_is_found_where_it_was_measured(added, steps):
    known = AddedSeconds()
    for size, drafted in steps * 20:
        known.measure(size + drafted, drafted, added * drafted)
    for size, drafted in steps:
        doubt = 0.25 * (size + drafted) / (known.known(size + drafted) + 0.25 * (size + drafted))
        found = known.per_token(size + drafted, 2e-3)
        assert found == pytest.approx((1 - doubt) * added + doubt * 2e-3)


@given(size=st.integers(1, 64), drafted=st.integers(1, 64), plain=st.floats(1e-3, 1))
def test_what_is_assumed_of_drafted_tokens_lies_between_nothing_and_a_share_of_the_step(size, drafted, plain):
    assumed = assumed_per_token(size, size + drafted, plain)
    assert 0 <= assumed < plain / size
    assert (assumed == 0) == (size + drafted <= RIDGE)


def test_acceptance_is_learned_by_bucket():
    acceptance, sequence = Acceptance(), Row(100, 0.5).sequence
    draft = Draft((1, 2, 3, 4, 5, 6), (0.7,) * 6, 6, "own text")
    for _ in range(200):
        acceptance.observe(sequence, draft, 1)  # one token right, one wrong each time
    long_match = Draft(draft.tokens, draft.chances, 60, draft.source)
    assert acceptance.paths(sequence, draft)[:2] == pytest.approx([0.5, 0.25], abs=0.05)
    assert acceptance.paths(sequence, long_match)[0] == pytest.approx(0.7)
    assert acceptance.paths(sequence, draft) == sorted(acceptance.paths(sequence, draft), reverse=True)


def test_an_answer_whose_drafts_fail_is_told_from_those_whose_drafts_do_not():
    acceptance, draft = Acceptance(), Draft((1, 2), (0.7,) * 2, 6, "own text")
    good, bad = Row(100, 0.5).sequence, Row(100, 0.5).sequence
    for _ in range(50):
        acceptance.observe(good, draft, 2)
        acceptance.observe(bad, draft, 0)
    assert acceptance.paths(good, draft)[0] > 0.9
    assert acceptance.paths(bad, draft)[0] < 0.1
    acceptance.ended(bad)
    assert 0.2 < acceptance.paths(bad, draft)[0] < 0.9  # as of one that has just begun
