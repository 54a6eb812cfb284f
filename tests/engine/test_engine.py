"""The whole engine on tiny models: greedy float32 equals transformers whatever the limits, and rows are islands."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from other_logits import change_logits

from batchgen.engine import Engine, Request, Sampling, sampling, workload
from batchgen.engine import engine as engine_module
from batchgen.engine.config import EngineSettings
from batchgen.engine.intake import refusal
from batchgen.engine.request import RowError
from batchgen.engine.runner import EngineFaultError
from batchgen.engine.spec import ModelError

MAX_TOKENS = 12
TOKENS = 288  # of the tiny tokenizer; the head has 300 rows


def prompts_with_shared_starts() -> list[list[int]]:
    """Six heads, branches inside blocks, one prompt that starts another, one of a single token."""
    long_start, short_start = tiny.random_prompt(37, seed=1), tiny.random_prompt(11, seed=2)
    prompts = [long_start + tiny.random_prompt(3 + i, seed=10 + i) for i in range(5)]
    prompts += [short_start + tiny.random_prompt(2 * i + 1, seed=20 + i) for i in range(4)]
    prompts += [long_start, long_start[:20] + tiny.random_prompt(9, seed=30), short_start[:1]]
    return [*prompts, tiny.random_prompt(90, seed=40), prompts[0]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> (folder, reference answers of the prompts); each made once."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(family: str) -> tuple[Path, list[list[int]]]:
        if family not in made:
            folder = tiny.tiny_model(family, tmp_path_factory.mktemp(family))
            answers = [
                tiny.reference_greedy(folder, prompt, MAX_TOKENS, allowed=TOKENS)
                for prompt in prompts_with_shared_starts()
            ]
            made[family] = (folder, answers)
        return made[family]

    return get


def load(folder: Path, **settings) -> Engine:
    return Engine.load(str(folder), device="cpu", dtype="float32", **{"memory": "1MiB", **settings})


def test_a_setting_that_is_not_legal_is_one_line() -> None:
    for settings, message in (
        ({"max_batch_tokens": -1}, "max_batch_tokens: must"),
        ({"block": 8}, "block: unknown key, did you mean block_size?"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            Engine.load("no/such/model", **settings)
        assert "\n" not in str(caught.value)


def greedy_requests(**sampling) -> list[Request]:
    chosen = Sampling(**{"max_tokens": MAX_TOKENS, "temperature": 0, **sampling})
    return [Request(key, prompt, chosen) for key, prompt in enumerate(prompts_with_shared_starts())]


def answers_of(engine: Engine, requests) -> list[list[int]]:
    finished = {completion.key: completion for completion in engine.run(requests)}
    assert all(completion.error is None for completion in finished.values())
    return [finished[key].tokens for key in sorted(finished)]


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
@pytest.mark.parametrize(
    ("block_size", "max_batch_tokens", "sharing"),
    [(8, 256, True), (16, 16, True), (32, 4096, True), (16, 4096, False), (1, 7, True)],
)
def test_greedy_equals_transformers(models, family, block_size, max_batch_tokens, sharing):
    folder, expected = models(family)
    engine = load(folder, block_size=block_size, max_batch_tokens=max_batch_tokens, prefix_sharing=sharing)
    assert answers_of(engine, greedy_requests()) == expected
    if sharing:
        assert engine.statistics.duplicates == 1
        assert engine.statistics.cached_prompt_tokens > 100
    else:
        assert engine.statistics.cached_prompt_tokens == len(prompts_with_shared_starts()[0])  # the duplicate


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_order_does_not_matter(models, family):
    folder, expected = models(family)
    engine = load(folder, block_size=8)
    for seed in range(3):
        requests = greedy_requests()
        random.Random(seed).shuffle(requests)
        assert answers_of(engine, iter(requests)) == expected


def test_one_by_one_equals_together(models):
    folder, expected = models("llama3")
    engine = load(folder)
    assert [answers_of(engine, [request])[0] for request in greedy_requests()] == expected


def kv_memory(folder: Path, num_blocks: int, block_size: int) -> int:
    shape = load(folder).model.kv_shape()
    return shape.bytes_per_token * num_blocks * block_size


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_preemption_changes_nothing(models, family):
    folder, expected = models(family)
    engine = load(folder, block_size=4, memory=kv_memory(folder, 26, 4), max_batch_tokens=64)
    # answers that end at once make the forecast small, so that the following ones are let in too early
    short = [
        Request(1000 + i, [6 + i], Sampling(max_tokens=80, temperature=0, stop_token_ids=tuple(range(TOKENS))))
        for i in range(64)
    ]
    requests = greedy_requests(max_tokens=MAX_TOKENS)
    finished = {completion.key: completion for completion in engine.run(iter(short + requests))}
    assert [finished[key].tokens for key in range(len(expected))] == expected
    assert engine.statistics.preemptions > 0
    assert engine.statistics.recomputed_tokens > 0


@pytest.mark.parametrize("fault", ["overwrite a block", "shift a position", "drop the mask"])
def test_the_parity_test_can_fail(models, fault, monkeypatch):
    folder, expected = models("smollm2")
    engine = load(folder, block_size=8)
    forward = engine.model.forward
    steps = iter(range(10**6))

    def broken(batch, pages):
        if fault == "overwrite a block" and next(steps) == 3:
            pages.layer(0).values.codes[:, 0] += 1.0
        if fault == "shift a position":
            batch.positions[-1] += 1
        return forward(batch, pages)

    if fault == "drop the mask":
        ops = type(engine._runner.kernels)
        plan = ops.plan_attention
        unmasked = lambda self, items, size: plan(self, replace(items, positions=items.positions + 10**6), size)  # noqa: E731
        monkeypatch.setattr(ops, "plan_attention", unmasked)
    monkeypatch.setattr(type(engine.model), "forward", lambda self, batch, pages: broken(batch, pages))
    assert answers_of(engine, greedy_requests()) != expected


def test_the_same_engine_twice_and_in_any_order_of_calls(models):
    folder, expected = models("llama3")
    engine = load(folder)
    requests = greedy_requests()
    for order in ([0], [1], [0], [1, 0], [0]):
        finished = {completion.key: completion.tokens for completion in engine.run([requests[key] for key in order])}
        assert finished == {key: expected[key] for key in order}


def test_fresh_and_shared_prefix_give_the_same_logits(models):
    """One code path: what a row's first token is drawn from agrees within 1e-5 whether its start was cached or not."""
    folder, _ = models("llama3")
    chosen = Sampling(max_tokens=1, temperature=0, logprobs=20)
    requests = [Request(key, prompt, chosen) for key, prompt in enumerate(prompts_with_shared_starts()[:5])]
    shared = {c.key: c.logprobs[0].top for c in load(folder).run(requests)}
    alone = {c.key: c.logprobs[0].top for c in load(folder, prefix_sharing=False).run(requests)}
    for key in shared:
        for (_, left), (_, right) in zip(shared[key], alone[key], strict=True):
            assert left == pytest.approx(right, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 90])
def test_chunks_give_the_same_logits(models, chunk):
    folder, _ = models("mistral")
    prompt = prompts_with_shared_starts()[-2]
    (completion,) = load(folder, max_batch_tokens=chunk).run(
        [Request(0, prompt, Sampling(max_tokens=1, temperature=0, logprobs=20))]
    )
    logits = tiny.reference_logits(folder, prompt)[-1, :TOKENS]
    expected = torch.log_softmax(logits, -1).topk(20)
    assert [token for token, _ in completion.logprobs[0].top] == expected.indices.tolist()
    assert [value for _, value in completion.logprobs[0].top] == pytest.approx(expected.values.tolist(), abs=1e-4)


SAMPLED = {
    "plain": Sampling(max_tokens=8, temperature=1.2, seed=3),
    "n": Sampling(max_tokens=8, temperature=1.2, n=3),
    "filters": Sampling(max_tokens=8, temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": Sampling(
        max_tokens=8, temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "min tokens": Sampling(max_tokens=8, temperature=1.0, min_tokens=6, stop_token_ids=tuple(range(6, 200))),
    "logprobs": Sampling(max_tokens=8, temperature=0.7, logprobs=3),
}


@pytest.mark.parametrize("name", list(SAMPLED))
def test_a_row_draws_the_same_alone_in_a_batch_and_preempted(models, name):
    folder, _ = models("qwen3")
    prompts = prompts_with_shared_starts()
    requests = [Request(key, prompt, SAMPLED[name]) for key, prompt in enumerate(prompts)]
    mixed = [Request(100 + key, prompt, other) for key, prompt in enumerate(prompts) for other in SAMPLED.values()]
    alone = [next(iter(load(folder).run([request]))).tokens for request in requests]
    tight = load(folder, block_size=4, memory=kv_memory(folder, 40, 4), max_batch_tokens=32)
    for engine in (load(folder, max_batch_tokens=64), tight):
        finished = {completion.key: completion.tokens for completion in engine.run([*requests, *mixed])}
        assert [finished[key] for key in range(len(requests))] == alone


def test_samples_of_a_row_differ_and_seeds_do_too(models):
    folder, _ = models("llama3")
    prompt = tiny.random_prompt(9)
    requests = [Request(0, prompt, Sampling(max_tokens=8, temperature=1.2, n=3, seed=seed)) for seed in (0, 1)]
    first, second = (next(iter(load(folder).run([request]))).tokens for request in requests)
    assert len({tuple(answer) for answer in (*first, *second)}) == 6


def test_padding_ids_are_never_drawn(models):
    folder, _ = models("llama3")
    engine = load(folder)

    def biased(logits):
        logits[:, TOKENS:] += 1000
        return logits

    change_logits(engine, biased)
    requests = [
        Request(key, tiny.random_prompt(4, key), Sampling(max_tokens=6, temperature=t, logprobs=5, ignore_eos=True))
        for key, t in enumerate((0, 1, 5.0))
    ]
    for completion in engine.run(requests):
        assert max(completion.tokens) < TOKENS
        assert all(token < TOKENS for entry in completion.logprobs for token, _ in entry.top)


def test_nan_logits_are_that_row_s_error(models):
    folder, expected = models("llama3")
    engine = load(folder)

    def poisoned(logits):
        if len(logits) > 1:
            logits[1, 5] = torch.nan
        return logits

    change_logits(engine, poisoned)
    requests = greedy_requests()
    finished = {completion.key: completion for completion in engine.run(requests)}
    failed = [key for key, completion in finished.items() if completion.error]
    assert failed
    assert all(finished[key].error.code == "numeric" for key in failed)
    assert all(finished[key].tokens == expected[key] for key in finished if key not in failed)


def test_a_step_that_raises_costs_only_the_row_at_fault(models):
    folder, expected = models("llama3")
    engine = load(folder)
    real = engine.model.forward
    bad = tuple(greedy_requests()[12].prompt[-3:])

    def fails(batch, pages):
        tokens = batch.tokens.tolist()
        if any(tuple(tokens[i : i + 3]) == bad for i in range(len(tokens))):
            raise RuntimeError("kernel fault")
        return real(batch, pages)

    engine.model.forward = fails
    finished = {completion.key: completion for completion in engine.run(greedy_requests())}
    assert finished[12].error == RowError("engine", "generate", "RuntimeError: kernel fault", retryable=True)
    assert all(finished[key].tokens == expected[key] for key in finished if key != 12)


def test_a_fault_of_the_device_ends_the_run(models):
    folder, _ = models("llama3")
    engine = load(folder)

    def fails(batch, pages):
        raise RuntimeError("device lost")

    engine.model.forward = fails
    with pytest.raises(EngineFaultError, match="8 rows in a row, last with RuntimeError: device lost"):
        list(engine.run(greedy_requests()))


def test_an_impossible_id_is_its_row_s_error(models):
    folder, expected = models("llama3")
    requests = [*greedy_requests(), *(Request(100 + i, [9, bad], Sampling()) for i, bad in enumerate((-1, 288, 2**40)))]
    finished = {completion.key: completion for completion in load(folder).run(requests)}
    assert [finished[key].tokens for key in range(len(expected))] == expected
    assert {finished[key].error.code for key in (100, 101, 102)} == {"bad_params"}


@pytest.mark.parametrize("weights", ["native", "int8", "int4", "fp8"])
def test_tokens_are_those_of_kept_logits(models, monkeypatch, weights):
    """Greedy and drawn rows get the same tokens whether or not somebody needs their logits."""
    folder, _ = models("llama3")
    engine = Engine.load(str(folder), device="cpu", memory="1MiB", dtype="bfloat16", weights=weights, speculation="off")
    requests = [
        Request(key, tiny.random_prompt(5, key), Sampling(max_tokens=12, temperature=heat, ignore_eos=True))
        for key, heat in enumerate((0, 0.8, 0, 1.5, 5.0))
    ]
    drawn = {completion.key: completion.tokens for completion in engine.run(requests)}
    monkeypatch.setattr(sampling, "draws_freely", lambda point: False)
    assert {completion.key: completion.tokens for completion in engine.run(requests)} == drawn


def test_min_tokens_is_what_transformers_calls_it(models):
    """An end token is impossible among the first min_tokens tokens and possible right behind them."""
    folder, _ = models("llama3")
    engine = load(folder)

    def eager_to_end(logits):
        logits[:, tiny.EOS] = 1000
        return logits

    change_logits(engine, eager_to_end)
    (completion,) = engine.run([Request(0, [9, 8], Sampling(max_tokens=20, min_tokens=8, temperature=0))])
    assert len(completion.tokens) == 9
    assert completion.tokens.index(tiny.EOS) == 8


def test_out_of_memory_at_one_row_ends_the_run(models):
    folder, _ = models("llama3")
    engine = load(folder)

    def fails(batch, pages):
        raise MemoryError("no more")

    engine.model.forward = fails
    with pytest.raises(MemoryError, match=r"engine\.max_batch_tokens"):
        list(engine.run(greedy_requests()))


def test_penalties_look_where_they_should(models):
    """Repetition sees prompt and answer, presence and frequency the answer only."""
    folder, _ = models("llama3")
    prompt = tiny.random_prompt(6, seed=3)
    logits = tiny.reference_logits(folder, prompt)[-1, :TOKENS]
    first = int(logits.argmax())
    expected = logits.clone()
    for token in set(prompt):
        expected[token] = expected[token] / 1.8 if expected[token] > 0 else expected[token] * 1.8
    (repetition,) = load(folder).run(
        [Request(0, prompt, Sampling(max_tokens=1, temperature=0, repetition_penalty=1.8))]
    )
    assert repetition.tokens == [int(expected.argmax())]
    (presence,) = load(folder).run(
        [Request(0, prompt, Sampling(max_tokens=2, temperature=0, presence_penalty=50.0, ignore_eos=True))]
    )
    assert presence.tokens[0] == first
    second = tiny.reference_logits(folder, [*prompt, first])[-1, :TOKENS]
    second[first] -= 50
    assert presence.tokens[1] == int(second.argmax())


def test_end_tokens_of_every_source_stop(models):
    folder, _ = models("llama3")
    engine = load(folder)
    assert engine.bounds.eos_ids == {tiny.EOS, tiny.TURN_END}
    for token in (tiny.EOS, tiny.TURN_END):

        def only(logits, token=token):
            logits = torch.full_like(logits, -5.0)
            logits[:, token] = 5.0
            return logits

        change_logits(engine, only)
        (completion,) = engine.run([Request(0, [9, 8], Sampling(max_tokens=5))])
        assert (completion.tokens, completion.finish_reason) == ([token], "stop")
        (ignored,) = engine.run([Request(0, [9, 8], Sampling(max_tokens=5, ignore_eos=True))])
        assert (ignored.tokens, ignored.finish_reason) == ([token] * 5, "length")


def test_stop_strings_are_found_across_token_edges(models):
    folder, _ = models("llama3")
    engine = load(folder)
    prompt = tiny.random_prompt(5, seed=8)
    (free,) = engine.run([Request(0, prompt, Sampling(max_tokens=24, temperature=0, ignore_eos=True))])
    text = engine.tokenizer.decode(free.tokens)
    pieces = {text[start : start + size] for size in range(1, 7) for start in range(len(text) - size)}
    for key, piece in enumerate(sorted(piece for piece in pieces if "\ufffd" not in piece)):
        (cut,) = engine.run(
            [Request(key, prompt, Sampling(max_tokens=24, temperature=0, ignore_eos=True, stop=(piece,)))]
        )
        assert cut.finish_reason == "stop"
        assert piece in engine.tokenizer.decode(cut.tokens)
        assert piece not in engine.tokenizer.decode(cut.tokens[:-1]).rstrip("\ufffd")
        assert cut.tokens == free.tokens[: len(cut.tokens)]


def test_context_boundary(models):
    folder, _ = models("llama3")
    engine = load(folder, memory="8MiB")
    length = engine.model.spec.context_length
    for prompt_length, fine in ((length - 5, True), (length - 4, False)):
        prompt = tiny.random_prompt(prompt_length)
        (completion,) = engine.run([Request(0, prompt, Sampling(max_tokens=5, temperature=0, ignore_eos=True))])
        assert (completion.error is None) == fine
        if not fine:
            assert completion.error.code == "context_length"
            assert str(length) in completion.error.message


def test_a_second_run_while_one_goes_on_is_refused(models):
    folder, _ = models("llama3")
    engine = load(folder)
    first = engine.run(greedy_requests())
    next(first)
    with pytest.raises(RuntimeError, match="middle of another run"):
        next(engine.run(greedy_requests()))
    first.close()
    assert len(list(engine.run(greedy_requests()))) == len(greedy_requests())


def test_bfloat16_changes_few_tokens(models):
    """Low precision is not exact; the share of rows that differ between batch sizes is bounded, not zero."""
    folder, _ = models("llama3")
    engine = Engine.load(str(folder), device="cpu", dtype="bfloat16", memory="1MiB")
    requests = greedy_requests(max_tokens=1)
    together = answers_of(engine, requests)
    single = [answers_of(engine, [request])[0] for request in requests]
    assert sum(a != b for a, b in zip(together, single, strict=True)) <= len(requests) // 4


def test_an_interrupted_run_ends_after_its_step_and_the_next_one_is_whole(models):
    folder, expected = models("llama3")
    engine = load(folder, max_sequences=2)
    run = engine.run(greedy_requests())
    next(run)
    engine.interrupt()
    assert len(list(run)) < len(expected) - 1
    assert answers_of(engine, greedy_requests()) == expected


def test_an_interrupt_reaches_a_run_that_has_not_begun_and_no_later_one(models):
    folder, expected = models("llama3")
    engine = load(folder, max_sequences=2)
    run = engine.run(greedy_requests())
    engine.interrupt()
    assert list(run) == []
    engine.interrupt()
    assert answers_of(engine, greedy_requests()) == expected


def test_prompts_of_a_collection_are_looked_at_once(models, monkeypatch):
    engine, asked = load(models("llama3")[0]), []
    monkeypatch.setattr(workload, "refusal", lambda one, limits: (asked.append(one.key), refusal(one, limits))[1])
    monkeypatch.setattr(engine_module, "refusal", lambda one, limits: pytest.fail("asked again"))
    bad = Request(99, [], Sampling(max_tokens=2))
    found = {one.key: one for one in engine.run([*greedy_requests(max_tokens=2), bad])}
    assert sorted(asked) == sorted(found)
    assert found[99].error.code == "empty_prompt"
    assert sum(one.error is not None for one in found.values()) == 1


def test_float16_runs_and_stays_near(models):
    folder, expected = models("llama3")
    engine = Engine.load(str(folder), device="cpu", dtype="float16", memory="1MiB")
    answers = answers_of(engine, greedy_requests(max_tokens=1))
    assert sum(answer[0] == whole[0] for answer, whole in zip(answers, expected, strict=True)) >= len(expected) - 2


def test_changed_speculation_is_told_when_a_run_with_it_begins(models):
    """Limits count at once; no larger ones than memory was measured for, where it was."""
    engine = load(models("llama3")[0], speculation="off", max_sequences=8)
    engine._measured_for = 512, 8
    run = engine.run(greedy_requests())
    next(run)
    engine.adopt(EngineSettings(speculation="ngram", max_batch_tokens=64, max_sequences=16))
    told = [engine.resolved[name] for name in ("max_batch_tokens", "max_sequences", "speculation")]
    assert told == [64, 8, "off"]
    list(run)
    run = engine.run(greedy_requests())
    next(run)
    assert engine.resolved["speculation"] == "ngram"


def test_a_run_launches_on_its_own_device_whatever_ran_between(models):
    engine = load(models("llama3")[0])
    answers = [Sampling(max_tokens=most, temperature=0, ignore_eos=True) for most in (2, 8)]
    bound, run = [], engine.run([Request(key, [3, 4, 5], one) for key, one in enumerate(answers)])
    next(run)

    class Watched:
        def bind(self):
            bound.append(engine.statistics.steps)

        def __getattr__(self, name):
            return getattr(link, name)

    sampler = engine._runner.sampler
    link = sampler.link
    engine._runner.sampler = replace(sampler, link=Watched())
    steps = engine.statistics.steps
    assert len(list(run)) == 1
    assert len(bound) >= engine.statistics.steps - steps + 1 > 1  # each step, and the end


@pytest.mark.parametrize("weights", ["int3", "INT8", ""])
def test_a_format_of_weights_that_is_none_is_refused_with_the_list(models, weights):
    with pytest.raises(ModelError, match=rf"^model\.weights: must be one of auto, native, .*int4.*, got '{weights}'$"):
        load(models("llama3")[0], weights=weights)


def test_a_number_format_that_is_none_is_refused_with_the_list(models):
    with pytest.raises(ModelError, match=r"^model\.dtype: must be one of auto, float32, bfloat16, .*, got 'bf16'$"):
        Engine.load(str(models("llama3")[0]), device="cpu", dtype="bf16")
