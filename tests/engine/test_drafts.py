"""Drafts in the scheduler: whatever is drafted, answers, blocks and counts are those without, and never stale keys."""

import random
from collections import Counter

import pytest
from drafters import adversaries, scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import VOCABULARY, PagedModel, drive, expected_answer, next_token, prompts_of_a_tree

from batchgen.engine.draft import suffix
from batchgen.engine.draft.ngram import REACH, OwnText
from batchgen.engine.draft.speculation import Drafting, Eager
from batchgen.engine.draft.suffix import DEEPEST, SuffixAutomaton, SuffixDrafter
from batchgen.engine.request import Request, RowError, Sampling
from batchgen.engine.sequence import Drawn


def truth(tokens: list[int], prompt_length: int) -> int:
    return next_token(tokens)


GUESSES = adversaries(truth, VOCABULARY)


@settings(max_examples=200, deadline=None)
@given(
    prompts=prompts_of_a_tree,
    block_size=st.integers(1, 9),
    slack=st.integers(0, 40),
    budget=st.integers(1, 40),
    max_sequences=st.integers(1, 12),
    sharing=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
    guess=st.sampled_from(sorted(GUESSES)),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=7),
)
def test_drafts_change_no_answer_whatever_the_limits(
    prompts, block_size, slack, budget, max_sequences, sharing, temperature, seed, guess, lengths
):
    noise = random.Random(seed)

    def sampling() -> Sampling:
        longest = noise.randint(1, 20)
        few = noise.randint(0, longest)
        return Sampling(max_tokens=longest, min_tokens=few, temperature=temperature, n=noise.randint(1, 3))

    requests = [Request(key, prompt, sampling()) for key, prompt in enumerate(prompts)]
    longest = max(len(request.prompt) + request.sampling.max_tokens for request in requests)
    finished, statistics = drive(
        requests,
        num_blocks=-(-longest // block_size) + slack // block_size,
        block_size=block_size,
        budget=budget,
        max_sequences=max_sequences,
        sharing=sharing,
        drafting=scripted(GUESSES[guess], lengths, VOCABULARY),
    )
    for completion in finished:
        request = requests[completion.key]
        answers = [sample.tokens for sample in completion.samples]
        assert answers == [expected_answer(request, sample) for sample in range(request.sampling.n)]
        reasons = {sample.finish_reason for sample in completion.samples}
        assert reasons <= {"stop", "length"}
    assert sorted(completion.key for completion in finished) == list(range(len(requests)))
    assert 0 <= statistics.accepted_tokens <= statistics.drafted_tokens


def free_running(count: int, max_tokens: int) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [Request(key, [key, 3, 1], sampling) for key in range(count)]


@pytest.mark.parametrize("length", range(1, 9))
def test_a_drafter_that_is_always_wrong_costs_tokens_and_nothing_else(length):
    requests = free_running(6, 24)
    _, off = drive(requests, budget=128)
    finished, statistics = drive(requests, budget=128, drafting=scripted(GUESSES["wrong"], [length], VOCABULARY))
    assert statistics.drafted_tokens > 0
    assert statistics.accepted_tokens == 0
    assert (statistics.steps, statistics.output_tokens) == (off.steps, off.output_tokens)
    assert all(completion.tokens == expected_answer(requests[completion.key]) for completion in finished)


def test_a_drafter_that_is_always_right_saves_steps():
    requests = free_running(6, 24)
    _, off = drive(requests, budget=128)
    _, statistics = drive(requests, budget=128, drafting=scripted(truth, [3], VOCABULARY))
    assert statistics.accepted_tokens == statistics.drafted_tokens > 0
    assert statistics.output_tokens == off.output_tokens
    assert statistics.steps == 6  # 24 tokens, four at a time


def test_drafts_survive_preemption():
    def ends_only_late(key):
        stop = tuple(range(VOCABULARY)) if key < 80 else (VOCABULARY - 1,)
        return Sampling(max_tokens=30, temperature=0, stop_token_ids=stop, ignore_eos=True)

    requests = [Request(key, [key % 50, key // 50, 2], ends_only_late(key)) for key in range(100)]
    plain, _ = drive(requests, num_blocks=20, block_size=4, budget=64)
    drafting = scripted(GUESSES["sometimes"], [5, 0, 2], VOCABULARY)
    finished, statistics = drive(requests, num_blocks=20, block_size=4, budget=64, drafting=drafting)
    assert statistics.preemptions > 0
    assert statistics.accepted_tokens > 0
    assert {c.key: c.tokens for c in finished} == {c.key: c.tokens for c in plain}


def test_a_draft_takes_no_block_that_a_row_needs():
    """Memory for exactly two rows to their end: they run side by side although drafts would like more."""
    requests = free_running(2, 13)
    drafting = scripted(truth, [12], VOCABULARY)
    _, statistics = drive(requests, num_blocks=8, block_size=4, budget=64, drafting=drafting)
    assert statistics.preemptions == 0
    assert statistics.accepted_tokens > 0


def test_an_error_behind_accepted_drafts_is_the_row_s_and_one_behind_a_wrong_one_is_nobody_s():
    class FailsAtFive(PagedModel):
        def draw_at(self, point):
            if point.answer_length == 5:
                return Drawn(error=RowError("numeric", "generate", "NaN"))
            return super().draw_at(point)

    requests = [Request(0, [1, 2], Sampling(max_tokens=9, temperature=0, ignore_eos=True))]
    for guess, code in (("right", "numeric"), ("wrong", "numeric")):
        finished, _ = drive(requests, model=FailsAtFive(4), drafting=scripted(GUESSES[guess], [7], VOCABULARY))
        assert finished[0].error.code == code
    short = [Request(0, [1, 2], Sampling(max_tokens=5, temperature=0, ignore_eos=True))]
    finished, _ = drive(short, model=FailsAtFive(4), drafting=scripted(GUESSES["wrong"], [7], VOCABULARY))
    assert finished[0].tokens == expected_answer(short[0])


def test_no_draft_of_a_row_that_is_over_is_kept():
    """Two samples with drafts in one step: the first fails, and with it the row of the second."""

    class FailsAtFive(PagedModel):
        def draw_at(self, point):
            if point.sequence.sample == 0 and point.answer_length == 5:
                return Drawn(error=RowError("numeric", "generate", "NaN"))
            return super().draw_at(point)

    made: list[Drafting] = []

    def drafting(statistics):
        made.append(scripted(GUESSES["wrong"], [2], VOCABULARY)(statistics))
        return made[-1]

    requests = [Request(key, [key, 2], Sampling(max_tokens=9, n=2, seed=key, ignore_eos=True)) for key in range(3)]
    finished, statistics = drive(requests, model=FailsAtFive(4), drafting=drafting)
    assert all(completion.error is not None for completion in finished)
    assert statistics.drafted_tokens > 0
    assert not made[0]._fed


# what finds drafts

ALIKE = [0, 1, 2**8, 2**16, 2**16 + 1]  # ids whose bytes, one after the other, hold each other


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.sampled_from(ALIKE), min_size=1, max_size=60), cuts=st.lists(st.integers(1, 60), max_size=5))
def test_own_text_drafts_what_followed_the_same_tokens(tokens, cuts):
    index = OwnText()
    for end in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        draft = index.draft(tokens[:end], 8)
        assert len(draft.tokens) <= min(8, draft.match)
        if draft.tokens:
            wanted = tokens[end - min(draft.match, DEEPEST) : end]
            whole = [*wanted, *draft.tokens]
            known = tokens[:end]
            assert any(known[at : at + len(whole)] == whole for at in range(end - len(wanted)))
        elif end > 3:
            pair = tokens[end - 2 : end]
            assert not any(tokens[at : at + 2] == pair for at in range(end - 2))


def test_own_text_is_searched_as_far_as_a_search_pays():
    for between, found in ((REACH - 5, (7, 9)), (REACH - 4, ())):
        tokens = [5, 6, 7, 9, *range(10, 10 + between), 5, 6]
        assert OwnText().draft(tokens, 2).tokens == found


def occurrences(texts: list[list[int]], run: list[int]) -> int:
    return sum(text[at : at + len(run)] == run for text in texts for at in range(len(text) - len(run) + 1))


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5),
    query=st.lists(st.integers(0, 2), max_size=12),
)
def test_the_automaton_counts_every_run(texts, query):
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    _, matched = automaton.find(query)
    longest = max(n for n in range(len(query) + 1) if n == 0 or occurrences(texts, query[len(query) - n :]))
    assert matched == longest
    draft = automaton.draft(query, 6)
    assert len(draft.tokens) <= min(6, matched)
    run = query[len(query) - matched :]
    for token, chance in zip(draft.tokens, draft.chances, strict=True):
        before = occurrences(texts, run)
        best = max(occurrences(texts, [*run, other]) for other in range(3))
        assert occurrences(texts, [*run, token]) == best
        assert chance == pytest.approx(best / (before + 0.5))
        run = [*run, token]


def test_the_automaton_stays_linear_in_one_repeated_token():
    automaton = SuffixAutomaton()
    automaton.add([1] * 5000)
    assert len(automaton._next) <= DEEPEST + 1
    assert automaton.find([1] * 200)[1] == DEEPEST


def test_suffix_learns_from_answers_of_other_rows():
    """Rows with one start share a group; the last of many equal answers is drafted nearly whole."""

    class SameAnswer(PagedModel):
        def draw_at(self, point):
            return Drawn((point.answer_length * 7 + 3) % VOCABULARY)

    requests = [
        Request(key, [*range(20), key % 50, key // 50], Sampling(max_tokens=40, temperature=0, ignore_eos=True))
        for key in range(60)
    ]
    steps = Counter()
    for name, drafting in (
        ("off", None),
        ("suffix", lambda statistics: Drafting(SuffixDrafter(), Eager(), VOCABULARY, statistics)),
    ):
        _, statistics = drive(requests, num_blocks=256, budget=256, model=SameAnswer(4), drafting=drafting)
        steps[name] = statistics.steps
    assert steps["off"] > 2 * steps["suffix"]


def test_what_suffix_keeps_is_bounded(monkeypatch):
    """Of many groups the latest; of a group two automata, the older of which goes when the younger is full."""
    monkeypatch.setattr(suffix, "MAX_GROUPS", 3)
    monkeypatch.setattr(suffix, "GENERATION", 200)
    drafter = SuffixDrafter()
    requests = [  # neighbours share a start of their group
        Request(key, [*range(key // 20, key // 20 + 20), key % 20], Sampling(max_tokens=30, temperature=0))
        for key in range(120)
    ]
    drive(
        requests,
        num_blocks=256,
        max_sequences=4,
        drafting=lambda statistics: Drafting(drafter, Eager(), VOCABULARY, statistics),
    )
    assert len(drafter._groups) == 3
    automata = [one for kept in drafter._groups.values() for one in (kept.younger, kept.older)]
    assert any(one.size >= 200 for one in automata)
    assert all(one.size < 200 + 30 + suffix.PROMPT_END for one in automata)
    assert all(len(one._next) <= 4 * one.size + 1 for one in automata)
